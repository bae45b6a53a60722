"""The conversation before a response: the input, the responses that it continues, and the items that it refers to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millstream.api.openai.responses.conversation import Message, messages_of, without_oldest
from millstream.api.openai.responses.ids import is_reasoning_id
from millstream.api.openai.responses.items_in import Entry, Reference, parse_item, parse_items
from millstream.api.openai.responses.request import Plan
from millstream.api.openai.responses.stored import JsonItem, StoredResponses
from millstream.errors import ContextOverflow, ResponseNotFound
from millstream.service.ports import Generation, Seal, Services
from millstream.types import GenerationRequest, ToolUse


@dataclass(frozen=True, slots=True)
class Context:
    history: list[JsonItem]
    input: list[JsonItem]
    """The items of the request itself; references are replaced by what they refer to."""
    entries: list[Entry]

    @property
    def items(self) -> list[JsonItem]:
        return [*self.history, *self.input]

    def messages(self, instructions: str | None, output: Sequence[JsonItem], seal: Seal) -> tuple[Message, ...]:
        """The conversation with the items that the model has written since."""
        return messages_of([*self.entries, *parse_items(output, seal, "output")], instructions)


async def resolve(plan: Plan, stored: StoredResponses, seal: Seal) -> Context:
    """Raises `NotFound` if something that the request refers to is not stored."""
    history = await stored.history(plan.previous)
    entries = parse_items(history, seal, "previous_response")
    found: dict[str, JsonItem] = {}
    for entry in plan.entries:
        if isinstance(entry, Reference):
            item = await stored.item(entry.item_id)
            if item is not None:
                found[entry.item_id] = item
                entries += parse_item(item, seal, entry.path)
            elif not is_reasoning_id(entry.item_id):  # a conversation can go on without old reasoning
                raise ResponseNotFound(
                    f"{entry.path} refers to the item {entry.item_id[:80]!r}, which is not stored. Send the item "
                    "itself.",
                    param=entry.path,
                )
        else:
            entries.append(entry)
    items = [found.get(str(item.get("id")), item) if _is_reference(item) else item for item in plan.input]
    return Context(history, items, entries)


def _is_reference(item: JsonItem) -> bool:
    return item.get("type") == "item_reference" or ("type" not in item and "role" not in item)


async def start_fitting(
    services: Services, plan: Plan, request: GenerationRequest, messages: tuple[Message, ...], tools: ToolUse | None
) -> Generation:
    """Starts a generation. With `truncation: auto`, the oldest turns are left out if the conversation is too long."""
    try:
        return await services.generation.start(request)
    except ContextOverflow:
        shorter = await _longest_fitting(services, plan, messages, tools) if plan.request.truncation == "auto" else None
        if shorter is None:
            raise
    return await services.generation.start(shorter)


async def _longest_fitting(
    services: Services, plan: Plan, messages: tuple[Message, ...], tools: ToolUse | None
) -> GenerationRequest | None:
    """The request with as many turns as fit, found by bisection. None if not even the last one fits."""
    limit = services.models.model(plan.request.model).context_length or 0
    forms = without_oldest(messages)
    low, high = 0, len(forms)
    while low < high:
        middle = (low + high) // 2
        request = plan.generation(forms[middle], tools)
        if await _fits(services, request, limit):
            high = middle
        else:
            low = middle + 1
    return plan.generation(forms[low], tools) if low < len(forms) else None


async def _fits(services: Services, request: GenerationRequest, limit: int) -> bool:
    """True if the prompt leaves room for the output, within reason."""
    room = min(request.max_tokens or limit // 8, limit // 2)
    try:
        return await services.generation.count_tokens(request) < limit - room
    except ContextOverflow:
        return False
