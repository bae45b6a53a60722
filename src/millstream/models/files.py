"""Reads the small files of a model folder, which are untrusted: each has a size limit and must be a regular file."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from millstream.errors import ModelError

MIB = 2**20
JSON_LIMIT = 8 * MIB
"""For config.json and the like. Parsing holds the GIL: 11 MiB of empty lists take 1.4 s."""
TEXT_LIMIT = 4 * MIB
"""For a chat template."""
LIMITS = {
    "tokenizer.json": 192 * MIB,
    "vocab.json": 64 * MIB,
    "tekken.json": 64 * MIB,
    "model.safetensors.index.json": 128 * MIB,
    ".model": 64 * MIB,
    ".txt": 64 * MIB,
    ".tiktoken": 64 * MIB,
    ".jinja": TEXT_LIMIT,
    ".json": JSON_LIMIT,
}
"""Size limits in bytes, by file name or else by suffix. Gemma's tokenizer.json has 33 MB."""
MAX_DEPTH = 64
"""Nesting of objects and lists."""


def size_limit(path: Path) -> int | None:
    return LIMITS.get(path.name, LIMITS.get(path.suffix))


def check_file(path: Path) -> int:
    """Returns its size. Raises `ModelError` if it is not a regular file (opening a FIFO would block for ever) or too
    large."""
    try:
        status = path.stat()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{path}: cannot be read: it is not a regular file")
    limit = size_limit(path)
    if limit is not None and status.st_size > limit:
        raise ModelError(f"{path}: has {status.st_size / MIB:.0f} MiB; at most {limit // MIB} MiB are allowed")
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
    """Read a JSON file that contains one object, such as config.json."""
    return parse_object(path, read_bytes(path))


def read_optional_object(path: Path) -> dict[str, Any]:
    """Like `read_object`, but returns an empty object if the file does not exist."""
    return read_object(path) if path.is_symlink() or path.exists() else {}


def parse_object(path: Path, text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ModelError(f"{path}: is not valid JSON: {error}") from error
    except RecursionError as error:
        raise ModelError(f"{path}: objects and lists are nested more than {MAX_DEPTH} levels deep") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must be a JSON object, but is a {type(value).__name__}")
    _check_depth(path, value)
    return value


def _check_depth(path: Path, value: dict[str, Any]) -> None:
    """Bounds the nesting, so that recursive code does not overflow the stack."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            children = item.values() if isinstance(item, dict) else item
            below.extend(each for each in children if isinstance(each, dict | list))
        if not below:
            return
        level = below
    raise ModelError(f"{path}: objects and lists are nested more than {MAX_DEPTH} levels deep")
