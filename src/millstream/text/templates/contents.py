"""Joins and wraps contents of messages, which are strings, null, or lists of parts."""

from __future__ import annotations

from typing import Any

BETWEEN = "\n\n"


def joined(first: object, second: object, between: str = BETWEEN) -> object:
    """Returns both contents as one, in order. An empty one adds nothing."""
    if not first or not second:
        return first or second or ""
    if isinstance(first, str) and isinstance(second, str):
        return first + between + second
    return [*_parts(first), *_parts(between), *_parts(second)]


def wrapped(before: str, content: object, after: str) -> object:
    """Returns the content between two texts."""
    if isinstance(content, list):
        return [*_parts(before), *content, *_parts(after)]
    return f"{before}{content or ''}{after}"


def _parts(content: object) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]
