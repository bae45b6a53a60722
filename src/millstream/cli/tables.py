"""Tables of a TOML file, read against the options that they may have. Every error says where and what would be right.

A reader of a value raises `ArgumentTypeError`, as the types of command line arguments do: both are read with the same
functions, and `read_table` adds the place.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from argparse import ArgumentTypeError
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from millstream.cli.arguments import duration, host_name, memory_size, memory_size_or_none, origin
from millstream.errors import ModelError

Reader = Callable[[Any], Any]

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def read_toml(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8-sig")
        return tomllib.loads(text)
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except tomllib.TOMLDecodeError as error:
        raise ModelError(f"{file} is not valid TOML: {error}") from error


def read_table(table: object, options: Mapping[str, Reader], *, file: Path, name: str) -> dict[str, Any]:
    """The values of the table called `name`; an empty name is the file itself."""
    if not isinstance(table, dict):
        raise ModelError(f"{file}: {name} must be a table: a line [{name}] and its options below")
    values = {}
    for key, value in table.items():
        if key not in options:
            raise ModelError(f"{file}: {_unknown(key, value, options, name)}")
        try:
            values[key] = options[key](value)
        except ArgumentTypeError as error:
            raise ModelError(f"{file}: {joined(name, key)}: {error}") from error
    return values


def joined(table: str, key: str) -> str:
    """`models` and `qwen2.5` as `models."qwen2.5"`, which is how TOML writes it."""
    written = key if _BARE_KEY.fullmatch(key) else f'"{key}"'
    return f"{table}.{written}" if table else written


def _unknown(key: str, value: object, options: Collection[str], name: str) -> str:
    kind = "table" if isinstance(value, dict) else "option"
    problem = f"[{name}] has no {kind} {key!r}" if name else f"there is no {kind} {key!r}"
    if near := difflib.get_close_matches(key, options, n=1):
        problem += f"; did you mean {near[0]!r}?"
    elif kind == "table" and name.startswith("models."):
        problem += '. A name that holds a dot needs quotes, as in [models."qwen2.5"].'
    elif not name and kind == "option":
        problem += " here: options stand below a line [server] or [models.NAME]."
    else:
        problem += "."
    return f"{problem} Known are: {', '.join(options)}"


def text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ArgumentTypeError(f"{_shown(value)} is not a text (in quotes, and not empty)")
    return value


def texts(value: object) -> tuple[str, ...]:
    """Does not repeat the value: keys of the API are read with this."""
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ArgumentTypeError('must be a list of texts, as in ["one", "two"]')
    return tuple(value)


def text_or_texts(value: object) -> tuple[str, ...]:
    items = value if isinstance(value, list) else [value]
    return tuple(text(item) for item in items)


def origins(value: object) -> tuple[str, ...]:
    return tuple(origin(item) for item in texts(value))


def host_names(value: object) -> tuple[str, ...]:
    return tuple(host_name(item) for item in texts(value))


def truth(value: object) -> bool:
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"{_shown(value)} is neither true nor false")
    return value


def one_of(*choices: str) -> Reader:
    def read(value: object) -> str:
        if not isinstance(value, str) or value not in choices:
            raise ArgumentTypeError(f"{_shown(value)} is not one of {', '.join(choices)}")
        return value

    return read


def one_number_of(*choices: int) -> Reader:
    def read(value: object) -> int:
        if type(value) is not int or value not in choices:
            raise ArgumentTypeError(f"{_shown(value)} is not one of {', '.join(map(str, choices))}")
        return value

    return read


def whole(low: int, high: int) -> Reader:
    def read(value: object) -> int:
        if type(value) is not int or not low <= value <= high:  # not isinstance: true is an int to Python
            raise ArgumentTypeError(f"{_shown(value)} is not a whole number from {low} to {high}")
        return value

    return read


def number(low: float, high: float, *, above: bool = False) -> Reader:
    """From `low` to `high`; with `above`, `low` itself is not allowed."""

    def read(value: object) -> float:
        if not _is_number(value) or not low <= value <= high or (above and value == low):
            span = f"above {low} and up to {high}" if above else f"from {low} to {high}"
            raise ArgumentTypeError(f"{_shown(value)} is not a number {span}")
        return float(value)

    return read


def time_span(value: object) -> float:
    """A number of seconds, or text as on the command line."""
    return duration(str(value))


def size(value: object) -> int:
    """A number of bytes, or text as on the command line."""
    return memory_size(str(value))


def size_or_none(value: object) -> int:
    return memory_size_or_none(str(value))


def _is_number(value: object) -> TypeGuard[int | float]:
    return type(value) in (int, float)


def _shown(value: object) -> str:
    """As TOML writes it, where that is not as Python does."""
    return str(value).lower() if isinstance(value, bool) else repr(value)
