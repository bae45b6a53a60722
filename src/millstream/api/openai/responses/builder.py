"""Builds the output items of a response from deltas, in their order."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.api.openai.responses.ids import REASONING, item_id
from millstream.api.openai.responses.items_out import (
    CALLS,
    ApprovalItem,
    Event,
    FunctionItem,
    JsonItem,
    McpItem,
    MessageItem,
    OutputItem,
    ReasoningItem,
    ToolListItem,
)
from millstream.api.openai.responses.tools import Catalog, Offer
from millstream.service.ports import Seal, ServerTool
from millstream.types import CallDelta, Delta, TextLogprob


class OutputBuilder:
    """Holds the items of one response. At most one of them grows at a time; calls of MCP servers stay open until they
    have run.

    With `seal`, reasoning items get `encrypted_content`. With `summarize`, they get a summary.
    """

    def __init__(self, response_id: str, seal: Seal | None, *, summarize: bool) -> None:
        self.catalog = Catalog()
        self._response_id = response_id
        self._seal = seal
        self._summarize = summarize
        self._generation = 0
        self._index = 0
        self._items: list[tuple[OutputItem, str]] = []
        """The items with their status. A call that turned out to be none is removed."""
        self._growing: OutputItem | None = None
        self._wrote = False
        """True if this generation has written an item."""
        self._calls: dict[int, FunctionItem] = {}
        """The calls of this generation, by their index in its deltas."""
        self._logprobs: list[TextLogprob] = []
        """Those of tokens whose text is still to come."""

    @property
    def items(self) -> list[JsonItem]:
        return [item.item(status) for item, status in self._items]

    @property
    def has_client_calls(self) -> bool:
        """True if this generation calls tools that the client runs or has to approve."""
        return any(not isinstance(call, McpItem) for call in self._calls.values())

    def pending_calls(self) -> list[McpItem]:
        """The calls of this generation that the server runs."""
        return [call for call in self._calls.values() if isinstance(call, McpItem) and call.output is None]

    def push(self, batch: Sequence[Delta]) -> list[Event]:
        events: list[Event] = []
        for delta in batch:
            if delta.reasoning:
                events += self._grow(ReasoningItem, REASONING, delta.reasoning)
            events += self._push_text(delta)
            for call in delta.calls:
                events += self._push_call(call)
        if self._growing is not None:
            events += self._growing.flush()
        return events

    def finish(self, *, incomplete: bool) -> list[Event]:
        """Ends a generation. The item that was growing is incomplete if the output was cut off. One that wrote nothing
        leaves an empty message: the next request of the conversation has a turn of the assistant there."""
        events = [] if self._wrote else self._open(MessageItem(self._id("msg"), self._next_index()))
        if self._logprobs and isinstance(self._growing, MessageItem):
            self._growing.add_logprobs(self._logprobs)
        self._logprobs = []
        return [*events, *self._close("incomplete" if incomplete else "completed")]

    def next_generation(self) -> None:
        self._generation += 1
        self._wrote = False
        self._calls = {}

    def settled(self, item: McpItem) -> None:
        """Its output is known."""
        self._set_status(item, "completed")

    def abandon_calls(self) -> list[Event]:
        """Ends the calls of this generation that are not to be run."""
        events: list[Event] = []
        for call in self.pending_calls():
            events += call.abandon()
            self._set_status(call, "incomplete")
        return events

    def list_tools(self, label: str, tools: Sequence[ServerTool]) -> list[Event]:
        listed: list[JsonItem] = [
            {"name": tool.name, "description": tool.description, "input_schema": tool.parameters, "annotations": None}
            for tool in tools
        ]
        item = ToolListItem(self._id("mcpl"), self._next_index(), label, listed)
        events = [*item.open(), *item.close("completed")]
        self._items.append((item, "completed"))
        return events

    def approved_call(self, request: JsonItem) -> tuple[McpItem, list[Event]]:
        """A call that was approved, to be run now."""
        offer = Offer("mcp", request["name"], request["server_label"])
        item = McpItem(self._id(McpItem.prefix), self._next_index(), request["id"], offer)
        item.approved_by = request["id"]
        self._items.append((item, "in_progress"))
        events = item.open()
        item.push(request["arguments"])
        return item, [*events, *item.close("in_progress")]

    def _push_text(self, delta: Delta) -> list[Event]:
        """A token may be half a character, so its log-probability may arrive before its text."""
        if delta.logprobs and not delta.reasoning:
            self._logprobs += delta.logprobs
        if not delta.text:
            return []
        events = self._grow(MessageItem, "msg", delta.text)
        if isinstance(self._growing, MessageItem):
            self._growing.add_logprobs(self._logprobs)
        self._logprobs = []
        return events

    def _grow(self, kind: type[ReasoningItem | MessageItem], prefix: str, text: str) -> list[Event]:
        events: list[Event] = []
        if not isinstance(self._growing, kind):
            item = kind(self._id(prefix), self._next_index())
            if isinstance(item, ReasoningItem):
                item.summarized = self._summarize
            events = [*self._close("completed"), *self._open(item)]
        assert self._growing is not None
        self._growing.push(text)
        return events

    def _push_call(self, piece: CallDelta) -> list[Event]:
        self._logprobs = []  # those of the call itself: only text has log-probabilities
        events: list[Event] = []
        call = self._calls.get(piece.index)
        if call is None:
            events += self._close("completed")
            call = self._new_call(piece)
            self._calls[piece.index] = call
            events += self._open(call)
        if piece.arguments:
            call.push(piece.arguments)
        return [*events, *self._void(piece.index)] if piece.void else events

    def _new_call(self, piece: CallDelta) -> FunctionItem:
        offer = self.catalog.offers.get(piece.name, Offer("function", piece.name))
        kind = ApprovalItem if offer.kind == "mcp" and offer.needs_approval else CALLS[offer.kind]
        return kind(self._id(kind.prefix), self._next_index(), piece.id, offer)

    def _void(self, index: int) -> list[Event]:
        """The call is none: its text follows as a message. Clients have seen its beginning, and no event takes an item
        back. So it ends as incomplete, and is not in the response."""
        call = self._calls.pop(index)
        self._growing = None
        self._items = [(item, status) for item, status in self._items if item is not call]
        if isinstance(call, ApprovalItem):
            return []
        events = call.close("incomplete")
        return [*events, *call.abandon()] if isinstance(call, McpItem) else events

    def _open(self, item: OutputItem) -> list[Event]:
        self._growing, self._wrote = item, True
        self._items.append((item, "in_progress"))
        return item.open()

    def _close(self, status: str) -> list[Event]:
        item, self._growing = self._growing, None
        if item is None:
            return []
        if isinstance(item, ReasoningItem) and self._seal is not None:
            item.sealed = self._seal.seal(item.text)
        if not isinstance(item, McpItem):
            self._set_status(item, status)
        return item.close(status)

    def _set_status(self, item: OutputItem, status: str) -> None:
        self._items = [(each, status if each is item else known) for each, known in self._items]

    def _id(self, prefix: str) -> str:
        return item_id(prefix, self._response_id, self._generation, self._index)

    def _next_index(self) -> int:
        self._index += 1
        return self._index - 1
