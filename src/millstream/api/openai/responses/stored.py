"""Stored responses: each with its own input items. One that continues another refers to it by id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from millstream.api.openai.responses.ids import is_response_id, response_of, sent_item_id
from millstream.errors import BadRequest, PreviousResponseNotFound, ResponseNotFound
from millstream.exact_json import dumps, loads_values
from millstream.service.ports import RecordStore

JsonItem = dict[str, Any]

MAX_CHAIN = 10_000
"""Responses in one conversation."""

_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


@dataclass(frozen=True, slots=True)
class Stored:
    response: dict[str, Any]
    input: list[JsonItem]

    @property
    def items(self) -> list[JsonItem]:
        return [*self.input, *self.response["output"]]


class StoredResponses:
    """Reads and writes them as JSON records."""

    def __init__(self, records: RecordStore) -> None:
        self._records = records

    async def put(self, response: dict[str, Any], items: Sequence[JsonItem]) -> None:
        record = {"response": response, "input": items}
        await self._records.put(response["id"], dumps(record))

    async def get(self, response_id: str) -> Stored:
        found = await self.find(response_id)
        if found is None:
            raise ResponseNotFound(
                f"There is no stored response {response_id[:64]!r}. It was not stored, was deleted, or has expired.",
                param="response_id",
            )
        return found

    async def find(self, response_id: str) -> Stored | None:
        if not is_response_id(response_id):
            return None
        record = await self._records.get(response_id)
        return None if record is None else Stored(**loads_values(record))

    async def delete(self, response_id: str) -> bool:
        if not is_response_id(response_id):
            return False
        await self._records.delete(_events_key(response_id))
        return await self._records.delete(response_id)

    async def history(self, response_id: str | None) -> list[JsonItem]:
        """All items of a response and of those that it continues, oldest first."""
        chain: list[list[JsonItem]] = []
        while response_id is not None:
            found = await self.find(response_id)
            if found is None or len(chain) >= MAX_CHAIN:
                raise PreviousResponseNotFound(
                    f"The response {response_id[:64]!r} is not stored. It was sent with store: false, was deleted, or "
                    "has expired. Send the whole conversation as input instead.",
                    param="previous_response_id",
                )
            if found.response["status"] in ("queued", "in_progress"):
                raise BadRequest(f"The response {response_id!r} is not complete yet.", param="previous_response_id")
            chain.append(found.items)
            response_id = found.response["previous_response_id"]
        return [item for items in reversed(chain) for item in items]

    async def item(self, item_id: str) -> JsonItem | None:
        """An item of a stored response, by its id."""
        owner = response_of(item_id)
        found = None if owner is None else await self.find(owner)
        return next((item for item in found.items if item.get("id") == item_id), None) if found else None

    async def put_events(self, response_id: str, events: bytes) -> None:
        """The stream of a background response, which clients may read again."""
        await self._records.put(_events_key(response_id), events)

    async def events(self, response_id: str) -> bytes | None:
        return await self._records.get(_events_key(response_id))


def _events_key(response_id: str) -> str:
    return f"{response_id}_events"


def with_ids(items: Sequence[JsonItem], response_id: str) -> list[JsonItem]:
    """Input items in the form in which they are listed: each has a type and an id, and content is a list of parts."""
    listed: list[JsonItem] = []
    for index, item in enumerate(items):
        kind = item.get("type") or ("message" if "role" in item else "item_reference")
        prefix = _PREFIXES.get(kind, "item")
        shown = {**item, "type": kind}
        if not shown.get("id"):
            shown["id"] = sent_item_id(prefix, response_id, index)
        if kind == "message":
            shown["status"] = "completed"
            if isinstance(item.get("content"), str):
                shown["content"] = [_text_part(str(item["role"]), item["content"])]
        listed.append(shown)
    return listed


def _text_part(role: str, text: str) -> JsonItem:
    if role == "assistant":
        return {"type": "output_text", "text": text, "annotations": []}
    return {"type": "input_text", "text": text}
