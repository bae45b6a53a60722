"""Reads the small files of a model folder. All of them were written by strangers, so each has a limit on its size."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from millstream.errors import ModelError

MIB = 2**20
JSON_LIMIT = 8 * MIB
"""For config.json and the like. Parsing holds the interpreter's lock: 11 MiB of empty lists take 1.4 s."""
TEXT_LIMIT = 4 * MIB
"""For a chat template."""
LIMITS = {
    "tokenizer.json": 192 * MIB,
    "vocab.json": 64 * MIB,
    "model.safetensors.index.json": 128 * MIB,
    ".model": 64 * MIB,
    ".txt": 64 * MIB,
    ".tiktoken": 64 * MIB,
    ".jinja": TEXT_LIMIT,
    ".json": JSON_LIMIT,
}
"""Bytes that a file may have, by its name or else by how its name ends. Gemma's tokenizer.json has 33 MB."""
MOST_LEVELS = 64
"""Of objects and lists inside each other."""


def limit_of(path: Path) -> int | None:
    return LIMITS.get(path.name, LIMITS.get(path.suffix))


def check_file(path: Path) -> int:
    """Its size. Raises `ModelError` for what is no plain file (opening a FIFO would wait for ever) or too large."""
    try:
        status = path.stat()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{path}: cannot be read: it is not a regular file")
    limit = limit_of(path)
    if limit is not None and status.st_size > limit:
        raise ModelError(f"{path}: has {status.st_size / MIB:.0f} MiB; at most {limit // MIB} MiB are read")
    return status.st_size


def read_bytes(path: Path) -> bytes:
    check_file(path)
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error


def read_text(path: Path) -> str:
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: is not UTF-8 text: {error.reason} at byte {error.start}") from error


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds one object, such as config.json."""
    return parse_object(path, read_bytes(path))


def read_optional_object(path: Path) -> dict[str, Any]:
    """The same; an empty object where there is no such file."""
    return read_object(path) if path.is_symlink() or path.exists() else {}


def parse_object(path: Path, text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ModelError(f"{path}: holds no JSON: {error}") from error
    except RecursionError as error:
        raise ModelError(f"{path}: more than {MOST_LEVELS} levels of objects and lists inside each other") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: a JSON object is needed, and it holds a {type(value).__name__}")
    _check_levels(path, value)
    return value


def _check_levels(path: Path, value: dict[str, Any]) -> None:
    """So that whatever walks through the value later does not run out of stack."""
    level: list[Any] = [value]
    for _ in range(MOST_LEVELS):
        below: list[Any] = []
        for item in level:
            inside = item.values() if isinstance(item, dict) else item
            below.extend(each for each in inside if isinstance(each, dict | list))
        if not below:
            return
        level = below
    raise ModelError(f"{path}: more than {MOST_LEVELS} levels of objects and lists inside each other")
