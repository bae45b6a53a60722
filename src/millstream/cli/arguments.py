"""Types of command line arguments, with errors that say what would be right. The file of `--config` uses them too."""

from __future__ import annotations

import argparse
import re
from decimal import Decimal

_AMOUNT = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([a-z]*)", re.IGNORECASE)
_SIZES = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
}
_TIMES = {"": 1, "s": 1, "m": 60, "h": 3600}
_LARGEST = 2**50
_LONGEST_HOURS = 8760
_HOST_NAME = re.compile(r"[a-z0-9_.-]{1,253}|[0-9a-f:.]*:[0-9a-f:.]*:[0-9a-f:.]*")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+", re.IGNORECASE)


def port(text: str) -> int:
    return whole(text, 0, 65535)


def positive(text: str) -> int:
    return whole(text, 1, 2**40)


def natural(text: str) -> int:
    return whole(text, 0, 2**40)


def whole(text: str, low: int, high: int) -> int:
    if not text.isdecimal() or not low <= int(text) <= high:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
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
    """Bytes. As on the boxes that memory is sold in, GB is 10^9; GiB is 2^30."""
    size = _amount(text, _SIZES)
    if size is None or not 1 <= size <= _LARGEST:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size of memory: write 16GB, 8GiB, 512MB or a count of bytes"
        )
    return int(size)


def memory_size_or_none(text: str) -> int:
    """The same, or 0 for none."""
    return 0 if text.strip() == "0" else memory_size(text)


def duration(text: str) -> float:
    """Seconds."""
    value = _amount(text, _TIMES)
    if value is None or value > _LONGEST_HOURS * 3600:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a time: write 90s, 10m, 2h or a number of seconds, at most {_LONGEST_HOURS}h"
        )
    return float(value)


def origin(text: str) -> str:
    """Lower case, as browsers send it."""
    if text != "*" and not _ORIGIN.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an origin: write https://example.com or http://localhost:3000, with no path; or * for all"
        )
    return text.lower()


def host_name(text: str) -> str:
    """Lower case, without the brackets of an IPv6 address."""
    name = text.strip().lower().removeprefix("[").removesuffix("]").rstrip(".")
    if text != "*" and not _HOST_NAME.fullmatch(name):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a host name: write example.com or 192.168.1.5, with no scheme and no port; or * for any"
        )
    return name


def _amount(text: str, units: dict[str, int]) -> Decimal | None:
    """A number with a unit, or None. Exact, since a size may have more digits than a float."""
    match = _AMOUNT.fullmatch(text.strip())
    unit = units.get(match[2].lower()) if match else None
    return Decimal(match[1]) * unit if match and unit else None
