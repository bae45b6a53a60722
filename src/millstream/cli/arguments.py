"""Parse values of command line options and of the config file. Errors say which values are accepted."""

from __future__ import annotations

import argparse
import re
from decimal import Decimal

from millstream.config import FAST_PATH_ALIASES

_AMOUNT = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([a-z]*)", re.IGNORECASE)
_SIZES = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
}
_TIMES = {"": 1, "s": 1, "m": 60, "h": 3600}
_MAX_BYTES = 2**50
_MAX_HOURS = 8760
_HOST_NAME = re.compile(r"[a-z0-9_.-]{1,253}|[0-9a-f:.]*:[0-9a-f:.]*:[0-9a-f:.]*")
_ORIGIN_WORDS = ("*", "loopback")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+", re.IGNORECASE)


def port(text: str) -> int:
    return integer(text, 0, 65535)


def positive(text: str) -> int:
    return integer(text, 1, 2**40)


def natural(text: str) -> int:
    return integer(text, 0, 2**40)


def share(text: str) -> float:
    """Above 0, to 1."""
    if not re.fullmatch(r"[0-9]{0,20}\.?[0-9]{1,20}", text) or not 0 < float(text) <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and up to 1")
    return float(text)


def integer(text: str, low: int, high: int) -> int:
    if not text.isdecimal() or not low <= int(text) <= high:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from {low} to {high}")
    return int(text)


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to 86400")
    return value


def memory_size(text: str) -> int:
    """A size in bytes. GB is 10^9, GiB is 2^30."""
    size = _amount(text, _SIZES)
    if size is None or not 1 <= size <= _MAX_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a memory size: use 16GB, 8GiB, 512MB or a number of bytes")
    return int(size)


def memory_size_or_none(text: str) -> int:
    """A memory size, or 0 for none."""
    return 0 if text.strip() == "0" else memory_size(text)


def duration(text: str) -> float:
    """A duration in seconds."""
    value = _amount(text, _TIMES)
    if value is None or value > _MAX_HOURS * 3600:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a duration: use 90s, 10m, 2h or a number of seconds, at most {_MAX_HOURS}h"
        )
    return float(value)


def milliseconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value <= 60_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of milliseconds from 1 to 60000")
    return value


def origin(text: str) -> str:
    """An origin in lower case, as browsers send it, or a word for several."""
    if text not in _ORIGIN_WORDS and not _ORIGIN.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an origin: use https://example.com or http://localhost:3000, without a path, loopback "
            "for all pages of this machine, or * for any"
        )
    return text.lower()


def host_name(text: str) -> str:
    """A host name in lower case, without the brackets of an IPv6 address."""
    name = text.strip().lower().removeprefix("[").removesuffix("]").rstrip(".")
    if text != "*" and not _HOST_NAME.fullmatch(name):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a host name: use example.com or 192.168.1.5, without a scheme or a port, or * for any"
        )
    return name


def fast_path(text: str) -> str:
    """The current name of a fast path. Its old name is still accepted."""
    return FAST_PATH_ALIASES.get(text, text)


def _amount(text: str, units: dict[str, int]) -> Decimal | None:
    """A number with a unit. Returns None if it is not one. Exact: a size may have more digits than a float."""
    match = _AMOUNT.fullmatch(text.strip())
    unit = units.get(match[2].lower()) if match else None
    return Decimal(match[1]) * unit if match and unit else None
