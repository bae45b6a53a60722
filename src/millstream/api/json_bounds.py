"""Looks through a large JSON body before it is parsed: counts its values, and finds numbers of unusual size.

The parser holds the GIL until it is done, and a body of tiny values takes a hundred times as long as one of text.
"""

from __future__ import annotations

from collections.abc import Iterator

from millstream.errors import BadRequest
from millstream.exact_json import may_change

MAX_CONTAINERS = 100_000
"""Objects and lists. The longest conversations have a few thousand messages, with a handful each."""
MAX_KEYS = 300_000
"""Keys of all objects, counted by colons: each takes ten times as long as a number. A `logit_bias` may name every token
of a vocabulary."""
MAX_VALUES = 2_000_000
"""Values, counted by commas. Numbers are cheap, and a prompt may be a list of token ids."""

_SLICE = 262_144
"""Bytes that are scanned at a time, so that other threads can run in between."""
_OVERLAP = 32
"""Bytes in which a number of unusual size can be recognised."""


def check_counts(raw: bytes) -> tuple[int, bool]:
    """Returns the number of objects and lists, and whether the value of a number `may_change`. Raises `BadRequest` if
    there are too many objects, lists, keys or values."""
    containers = keys = values = 0
    changes = False
    last = b""
    for piece in outside_strings(raw):
        changes = changes or may_change(last + piece)
        last = piece[-_OVERLAP:]
        containers += piece.count(b"[") + piece.count(b"{")
        keys += piece.count(b":")
        values += piece.count(b",")
        if containers > MAX_CONTAINERS:
            raise BadRequest(f"The request body has more than {MAX_CONTAINERS} objects and lists.")
        if keys > MAX_KEYS:
            raise BadRequest(f"The request body has more than {MAX_KEYS} keys.")
        if values > MAX_VALUES:
            raise BadRequest(f"The request body has more than {MAX_VALUES} values.")
    return containers, changes


def outside_strings(raw: bytes) -> Iterator[bytes]:
    """Yields the parts of a JSON text that are outside its strings, a slice at a time."""
    inside = 0
    carry = b""
    for start in range(0, len(raw), _SLICE):
        piece = carry + raw[start : start + _SLICE]
        carry = b""
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece, carry = piece[:-1], b"\\"  # it escapes the first character of the next slice
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield b"".join(parts[inside::2])
        inside ^= (len(parts) - 1) % 2
