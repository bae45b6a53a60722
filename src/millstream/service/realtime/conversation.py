"""The items of a conversation in their order, and the prompt that they make."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from millstream.errors import BadRequest, ItemNotFound
from millstream.realtime_types import Item, Part

ROOT = "root"
"""As the previous item: before all others."""
MAX_ITEMS = 4_000
MAX_CHARS = 8 * 2**20
"""Characters of all items together."""


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


class Conversation:
    def __init__(self) -> None:
        self._items: dict[str, Item] = {}
        self._order: list[str] = []
        self._chars = 0

    @property
    def last_id(self) -> str | None:
        return self._order[-1] if self._order else None

    @property
    def items(self) -> tuple[Item, ...]:
        return tuple(self._items[item_id] for item_id in self._order)

    def make_room(self) -> None:
        """Forget the oldest items if it is full. Sessions may last for hours."""
        while self._order and (len(self._order) >= MAX_ITEMS or self._chars > MAX_CHARS):
            self.delete(self._order[0])

    def add(self, item: Item, previous_item_id: str | None = None) -> str | None:
        """Returns the id of the item before it."""
        if item.id in self._items:
            raise BadRequest(f"There is an item with the id {item.id[:64]!r} already.", param="item.id")
        size = _size(item)
        if len(self._order) >= MAX_ITEMS or self._chars + size > MAX_CHARS:
            raise BadRequest("The conversation is full. Delete items, or begin a new session.")
        place = len(self._order) if previous_item_id is None else self._after(previous_item_id)
        self._items[item.id] = item
        self._order.insert(place, item.id)
        self._chars += size
        return self._order[place - 1] if place else None

    def has(self, item_id: str) -> bool:
        return item_id in self._items

    def previous(self, item_id: str) -> str | None:
        place = self._order.index(item_id)
        return self._order[place - 1] if place else None

    def get(self, item_id: str) -> Item:
        if (item := self._items.get(item_id)) is None:
            raise ItemNotFound(f"The conversation has no item {item_id[:64]!r}.", param="item_id")
        return item

    def replace(self, item: Item) -> None:
        """Does nothing if it was deleted."""
        if item.id in self._items:
            self._chars += _size(item) - _size(self._items[item.id])
            self._items[item.id] = item

    def delete(self, item_id: str) -> None:
        self._chars -= _size(self.get(item_id))
        del self._items[item_id]
        self._order.remove(item_id)

    def _after(self, item_id: str) -> int:
        if item_id == ROOT:
            return 0
        if item_id not in self._items:
            raise ItemNotFound(f"previous_item_id names {item_id[:64]!r}, which is not here.", param="previous_item_id")
        return self._order.index(item_id) + 1


def with_transcript(item: Item, text: str) -> Item:
    """The item, with the text of its audio."""
    parts = tuple(replace(part, text=text) if part.kind == "input_audio" else part for part in item.parts)
    return replace(item, parts=parts)


def messages_of(items: Iterable[Item], instructions: str) -> tuple[dict[str, object], ...]:
    """The prompt, in the form that chat templates take. Calls join the answer that they belong to, and answers that
    nobody heard a word of are left out."""
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        if item.kind == "function_call":
            call = {"id": item.call_id, "type": "function"}
            call |= {"function": {"name": item.name, "arguments": item.arguments or "{}"}}  # type: ignore[dict-item]
            last = messages[-1] if messages else {}
            if last.get("role") != "assistant":
                last = {"role": "assistant", "content": None}
                messages.append(last)
            last.setdefault("tool_calls", []).append(call)
        elif item.kind == "function_call_output":
            messages.append({"role": "tool", "content": item.output, "tool_call_id": item.call_id})
        elif content := _content(item.parts):
            messages.append({"role": item.role, "content": content})
    return tuple(messages)


def _content(parts: Sequence[Part]) -> str | list[dict[str, object]]:
    if all(part.media is None for part in parts):
        return "\n".join(part.text for part in parts if part.text)
    content: list[dict[str, object]] = []
    for part in parts:
        if part.media is not None:
            content.append({"type": part.media.kind, "media": part.media})
        elif part.text:
            content.append({"type": "text", "text": part.text})
    return content


def _size(item: Item) -> int:
    texts = (len(part.text or "") + (len(part.media.source) if part.media else 0) for part in item.parts)
    return sum(texts) + len(item.arguments) + len(item.output) + len(item.name)
