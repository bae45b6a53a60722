"""What a large JSON body may hold, told before it is parsed: the parser keeps the interpreter's lock to its end, and a
body of tiny values takes a hundred times as long as one of text."""

from __future__ import annotations

from collections.abc import Iterator

from millstream.errors import BadRequest

MAX_CONTAINERS = 100_000
"""Objects and lists. The longest conversations have a few thousand messages, each with a handful."""
MAX_VALUES = 2_000_000
"""Separated by commas: numbers are cheap, and a prompt may come as token ids."""

_SLICE = 262_144
"""Bytes looked at in one go: other threads run in between."""


def check_counts(raw: bytes) -> int:
    """How many objects and lists there are. Raises `BadRequest` for too many of anything."""
    containers = values = 0
    for piece in outside_strings(raw):
        containers += piece.count(b"[") + piece.count(b"{")
        values += piece.count(b",")
        if containers > MAX_CONTAINERS:
            raise BadRequest(f"The request body holds more than {MAX_CONTAINERS} objects and lists.")
        if values > MAX_VALUES:
            raise BadRequest(f"The request body holds more than {MAX_VALUES} values.")
    return containers


def outside_strings(raw: bytes) -> Iterator[bytes]:
    """The parts of a JSON text that are not inside its strings, some at a time."""
    inside = 0
    carry = b""
    for start in range(0, len(raw), _SLICE):
        piece = carry + raw[start : start + _SLICE]
        carry = b""
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece, carry = piece[:-1], b"\\"  # it belongs to the character in the next slice
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield b"".join(parts[inside::2])
        inside ^= (len(parts) - 1) % 2
