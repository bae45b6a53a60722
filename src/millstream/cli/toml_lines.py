"""Find the lines of tables and keys in a TOML file: Python's reader of TOML does not tell them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from typing import Any

Lines = Mapping[tuple[str, ...], int]
"""Line numbers, from 1, by the path of a table or key."""

_TABLE = re.compile(r"\s*(\[[^\[].*?\])\s*(?:#.*)?")
_KEY = re.compile(r"""\s*((?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*'))*)\s*=""")


def find_lines(text: str) -> Lines:
    """The lines of a valid file. Strings of several lines could look like tables: a file with one has no lines."""
    if '"""' in text or "'''" in text:
        return {}
    found: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        if match := _TABLE.fullmatch(line):
            if (path := _path_of(match[1])) is not None:
                table = path
                found.setdefault(table, number)
        elif (match := _KEY.match(line)) and (path := _path_of(f"{match[1]} = 0")) is not None:
            found.setdefault((*table, *path), number)
    return found


def _path_of(line: str) -> tuple[str, ...] | None:
    """The dotted key of a table or a key, by the real parser. None if the line is no such thing."""
    try:
        inner: Any = tomllib.loads(line)
    except tomllib.TOMLDecodeError:
        return None
    path = []
    while isinstance(inner, dict) and inner:
        key, inner = next(iter(inner.items()))
        path.append(key)
    return tuple(path)
