"""Validate tables of a TOML file. Errors say where the problem is and which values are accepted.

A reader of a value raises `ArgumentTypeError`, like the types of command line arguments, since both share parsing
functions. `read_table` adds the file and the option to the message.
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


def read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def parse_toml(text: str, file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ModelError(f"{file} is not valid TOML: {error}") from error


def read_table(table: object, options: Mapping[str, Reader], *, file: Path, name: str) -> dict[str, Any]:
    """The values of the table called `name`. An empty name means the top level of the file."""
    if not isinstance(table, dict):
        raise ModelError(f"{file}: {name} must be a table: a line [{name}], followed by its options")
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
    """A dotted key as TOML writes it: `models` and `qwen2.5` become `models."qwen2.5"`."""
    written = key if _BARE_KEY.fullmatch(key) else f'"{key}"'
    return f"{table}.{written}" if table else written


def _unknown(key: str, value: object, options: Collection[str], name: str) -> str:
    kind = "table" if isinstance(value, dict) else "option"
    problem = f"[{name}] has no {kind} {key!r}" if name else f"there is no {kind} {key!r}"
    if near := difflib.get_close_matches(key, options, n=1):
        problem += f"; did you mean {near[0]!r}?"
    elif kind == "table" and name.startswith("models."):
        problem += '. A name with a dot needs quotes: [models."qwen2.5"].'
    elif kind == "table" and name == "mcp":
        problem += ": MCP servers are tables [mcp.servers.NAME]."
    elif not name and kind == "option":
        problem += " at the top level: options belong below a line [server] or [models.NAME]."
    else:
        problem += "."
    return f"{problem} Known: {', '.join(options)}"


def string(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ArgumentTypeError(f"{_shown(value)} is not a string (in quotes, not empty)")
    return value


def strings(value: object) -> tuple[str, ...]:
    """Errors do not repeat the value: it may be an API key."""
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ArgumentTypeError('must be a list of strings, e.g. ["one", "two"]')
    return tuple(value)


def string_table(value: object) -> tuple[tuple[str, str], ...]:
    """Names and strings. Errors do not repeat the values: they may be secrets."""
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise ArgumentTypeError('must be a table of strings, e.g. { NAME = "value" }')
    return tuple(value.items())


def string_or_strings(value: object) -> tuple[str, ...]:
    items = value if isinstance(value, list) else [value]
    return tuple(string(item) for item in items)


def origins(value: object) -> tuple[str, ...]:
    return tuple(origin(item) for item in strings(value))


def host_names(value: object) -> tuple[str, ...]:
    return tuple(host_name(item) for item in strings(value))


def boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"{_shown(value)} is not true or false")
    return value


def choice(*choices: str) -> Reader:
    def read(value: object) -> str:
        if not isinstance(value, str) or value not in choices:
            raise ArgumentTypeError(f"{_shown(value)} is not one of {', '.join(choices)}")
        return value

    return read


def integer_choice(*choices: int) -> Reader:
    def read(value: object) -> int:
        if type(value) is not int or value not in choices:
            raise ArgumentTypeError(f"{_shown(value)} is not one of {', '.join(map(str, choices))}")
        return value

    return read


def integer(low: int, high: int) -> Reader:
    def read(value: object) -> int:
        if type(value) is not int or not low <= value <= high:  # not isinstance: True is an int in Python
            raise ArgumentTypeError(f"{_shown(value)} is not an integer from {low} to {high}")
        return value

    return read


def number(low: float, high: float, *, exclusive_low: bool = False) -> Reader:
    """A number from `low` to `high`, without `low` itself if `exclusive_low`."""

    def read(value: object) -> float:
        if not _is_number(value) or not low <= value <= high or (exclusive_low and value == low):
            span = f"above {low} and up to {high}" if exclusive_low else f"from {low} to {high}"
            raise ArgumentTypeError(f"{_shown(value)} is not a number {span}")
        return float(value)

    return read


def time_span(value: object) -> float:
    """A number of seconds, or a string as on the command line."""
    return duration(str(value))


def size(value: object) -> int:
    """A number of bytes, or a string as on the command line."""
    return memory_size(str(value))


def size_or_none(value: object) -> int:
    return memory_size_or_none(str(value))


def _is_number(value: object) -> TypeGuard[int | float]:
    return type(value) in (int, float)


def _shown(value: object) -> str:
    """The value as TOML writes it: booleans differ from Python."""
    return str(value).lower() if isinstance(value, bool) else repr(value)
