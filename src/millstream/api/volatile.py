"""Removes headers that agents write into system messages and that differ in each request.

They say nothing to the model, but stand at the start of the prompt: with them, no prefix would ever be found in the
cache. Only exact, known headers are removed. Dates, folders and the like are for the model, and stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

VOLATILE_HEADERS = ("x-anthropic-billing-header:",)
"""Beginnings of lines. Claude Code sends this one, as a system block of its own."""


def without_volatile(text: str) -> str:
    """Returns a system text without the volatile lines that begin it."""
    while text.startswith(VOLATILE_HEADERS):
        text = text.partition("\n")[2]
    return text


def is_volatile(text: str) -> bool:
    """True if nothing is left of a system text without its volatile lines."""
    return text.startswith(VOLATILE_HEADERS) and not without_volatile(text).strip()


def stable_messages(messages: Sequence[object]) -> list[object]:
    """Returns messages, as a client sent them, whose system messages have no volatile lines. A message of nothing else
    is left out, unless it is the only one.

    This comes before the messages are checked: anything that is no message stays, for others to refuse.
    """
    found = [
        {**message, "content": _stable(message.get("content"))} if _is_system(message) else message
        for message in messages
        if not (_is_system(message) and len(messages) > 1 and _is_volatile(message.get("content")))
    ]
    return found or list(messages[:1])


def _is_system(message: object) -> TypeGuard[dict[str, object]]:
    return isinstance(message, dict) and message.get("role") in ("system", "developer")


def _is_volatile(content: object) -> bool:
    texts = _texts(content)
    return bool(texts) and all(text is not None and is_volatile(text) for text in texts)


def _stable(content: object) -> object:
    """A part that was only volatile stays as an empty one, so that an error names the right part."""
    if isinstance(content, str):
        return without_volatile(content)
    if not isinstance(content, list):
        return content
    return [
        part if text is None else {**part, "text": without_volatile(text)}
        for part, text in zip(content, _texts(content), strict=True)
    ]


def _texts(content: object) -> list[str | None]:
    """Returns the text of each part; None for a part that has none."""
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else []
    return [text if isinstance(part, dict) and isinstance(text := part.get("text"), str) else None for part in parts]
