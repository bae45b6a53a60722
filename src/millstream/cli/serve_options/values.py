"""Kinds of option values: how a value is written as text (a flag or a variable) and in TOML, and how it is shown."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from millstream.cli import arguments
from millstream.cli import toml_tables as toml
from millstream.cli.toml_tables import Reader

MAX_COUNT = 2**40
_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_UNITS = {f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}


@dataclass(frozen=True, slots=True)
class Value:
    """Both readers raise `ArgumentTypeError`, which says what is accepted."""

    text: Callable[[str], Any]
    toml: Reader
    accepts: str
    """What is accepted, for the table of options."""
    show: Callable[[Any], str] = str
    metavar: str | None = None
    choices: tuple[Any, ...] | None = None
    is_list: bool = False
    """The flag is repeatable, the variable is separated by commas, and `text` reads one item."""
    is_switch: bool = False
    """The flag takes no value: `--name` or `--no-name`."""
    is_path: bool = False
    """In a file, relative to the file's folder."""

    def from_variable(self, text: str) -> Any:
        if self.is_list:
            return tuple(self.text(item.strip()) for item in text.split(",") if item.strip())
        return self.text(text.strip())


def boolean(text: str) -> bool:
    if (value := _BOOLEANS.get(text.strip().lower())) is None:
        raise ArgumentTypeError(f"{text!r} is not one of {', '.join(_BOOLEANS)}")
    return value


def path(text: str) -> Path:
    return Path(text).expanduser()


def show_size(size: int) -> str:
    """As `memory_size` reads it, exactly: in the unit that makes the number shortest."""
    exact = [(size // factor, unit) for unit, factor in _UNITS.items() if size and size % factor == 0]
    number, unit = min(exact, default=(size, ""))
    return f"{number}{unit}"


def show_time(seconds: float) -> str:
    """As `duration` reads it."""
    for unit, factor in (("h", 3600), ("m", 60)):
        if seconds and seconds % factor == 0:
            return f"{seconds / factor:g}{unit}"
    return f"{seconds:g}s"


def integer(low: int, high: int = MAX_COUNT, *, metavar: str = "COUNT") -> Value:
    accepts = f"an integer from {low}" + (f" to {high}" if high < MAX_COUNT else "")
    return Value(lambda text: arguments.integer(text, low, high), toml.integer(low, high), accepts, metavar=metavar)


def choice(*choices: str, metavar: str | None = None) -> Value:
    """`metavar`: for choices that the option's help lists."""
    accepts = ", ".join(choices) if metavar is None else "a name"
    return Value(toml.choice(*choices), toml.choice(*choices), accepts, metavar=metavar, choices=choices)


def integer_choice(*choices: int) -> Value:
    def read(text: str) -> int:
        value: int = toml.integer_choice(*choices)(int(text) if text.isdecimal() else text)
        return value

    return Value(read, toml.integer_choice(*choices), ", ".join(map(str, choices)), choices=choices)


def listed(item: Value, read_toml: Reader, accepts: str) -> Value:
    """Several values of a kind."""

    def show(values: Any) -> str:
        return ", ".join(map(item.show, values))

    return replace(item, toml=read_toml, accepts=accepts, show=show, is_list=True)


TEXT = Value(str, toml.string, "text", metavar="TEXT")
PATH = Value(path, toml.string, "a path", metavar="FOLDER", is_path=True)
SWITCH = Value(boolean, toml.boolean, "true or false", lambda value: str(value).lower(), is_switch=True)
SIZE = Value(arguments.memory_size, toml.size, "a size such as 16GB, 8GiB or 512MB", show_size, "SIZE")
SIZE_OR_NONE = Value(arguments.memory_size_or_none, toml.size_or_none, "a size such as 2GiB, or 0", show_size, "SIZE")
SHARE = Value(arguments.share, toml.number(0, 1, exclusive_low=True), "a number above 0, to 1", metavar="SHARE")
TIME = Value(arguments.duration, toml.time_span, "a time such as 90s, 10m or 2h", show_time, "TIME")
MILLISECONDS = Value(
    arguments.milliseconds,
    toml.number(1, 60_000),
    "milliseconds from 1 to 60000",
    lambda value: f"{value:g}",
    "MS",
)
