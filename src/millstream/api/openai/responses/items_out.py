"""Output items: each is built piece by piece, and tells its events as it grows.

The items of a whole response are built in the same way, so both forms have equal items.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millstream.api.openai.chunk import finite
from millstream.api.openai.custom_tools import InputDecoder
from millstream.api.openai.responses.tools import Offer
from millstream.service.ports import ToolOutput
from millstream.types import TextLogprob

Event = dict[str, Any]
JsonItem = dict[str, Any]


class OutputItem:
    """One item. `open`, `push` any number of times with `flush` in between, then `close`."""

    def __init__(self, item_id: str, index: int) -> None:
        self.id = item_id
        self.index = index
        self._text: list[str] = []
        self._new: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._text)

    def item(self, status: str) -> JsonItem:
        """The item as it is now."""
        raise NotImplementedError

    def open(self) -> list[Event]:
        return [self._item_event("added", "in_progress")]

    def push(self, text: str) -> None:
        self._text.append(text)
        self._new.append(text)

    def flush(self) -> list[Event]:
        """One event for all that is new. So tokens that arrive together are one event."""
        text, self._new = "".join(self._new), []
        return self._delta(text) if text else []

    def close(self, status: str) -> list[Event]:
        return [*self.flush(), *self._done(), self._item_event("done", status)]

    def _delta(self, text: str) -> list[Event]:
        return []

    def _done(self) -> list[Event]:
        return []

    def _item_event(self, name: str, status: str) -> Event:
        return {"type": f"response.output_item.{name}", "output_index": self.index, "item": self.item(status)}

    def _event(self, name: str, **fields: object) -> Event:
        return {"type": f"response.{name}", "item_id": self.id, "output_index": self.index, **fields}


class ReasoningItem(OutputItem):
    sealed: str | None = None
    """The text in a form that only this server can read, if the client wants that."""
    summarized: bool = False
    """True if the client wants a summary. It is the text itself: many clients show nothing else."""

    def item(self, status: str) -> JsonItem:
        content = [{"type": "reasoning_text", "text": self.text}] if self._text else []
        return {
            "id": self.id,
            "type": "reasoning",
            "summary": [self._summary()] if self.summarized and self._text else [],
            "content": content,
            "encrypted_content": self.sealed,
            "status": status,
        }

    def open(self) -> list[Event]:
        part = {"type": "reasoning_text", "text": ""}
        events = [*super().open(), self._event("content_part.added", content_index=0, part=part)]
        summary = self._event("reasoning_summary_part.added", summary_index=0, part=self._summary())
        return [*events, summary] if self.summarized else events

    def _delta(self, text: str) -> list[Event]:
        events = [self._event("reasoning_text.delta", content_index=0, delta=text)]
        summary = self._event("reasoning_summary_text.delta", summary_index=0, delta=text)
        return [*events, summary] if self.summarized else events

    def _done(self) -> list[Event]:
        part = {"type": "reasoning_text", "text": self.text}
        events = [
            self._event("reasoning_text.done", content_index=0, text=self.text),
            self._event("content_part.done", content_index=0, part=part),
        ]
        if self.summarized:
            events.append(self._event("reasoning_summary_text.done", summary_index=0, text=self.text))
            events.append(self._event("reasoning_summary_part.done", summary_index=0, part=self._summary()))
        return events

    def _summary(self) -> JsonItem:
        return {"type": "summary_text", "text": self.text}


class MessageItem(OutputItem):
    def __init__(self, item_id: str, index: int) -> None:
        super().__init__(item_id, index)
        self._logprobs: list[TextLogprob] = []
        self._new_logprobs: list[TextLogprob] = []

    def item(self, status: str) -> JsonItem:
        content = [] if status == "in_progress" and not self._text else [self._part()]
        return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": content}

    def open(self) -> list[Event]:
        return [*super().open(), self._event("content_part.added", content_index=0, part=self._part())]

    def add_logprobs(self, logprobs: Sequence[TextLogprob]) -> None:
        self._logprobs += logprobs
        self._new_logprobs += logprobs

    def _part(self) -> JsonItem:
        logprobs = [_token(token, with_bytes=True) for token in self._logprobs]
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": logprobs}

    def _delta(self, text: str) -> list[Event]:
        new, self._new_logprobs = self._new_logprobs, []
        return [self._event("output_text.delta", content_index=0, delta=text, logprobs=_tokens(new))]

    def _done(self) -> list[Event]:
        return [
            self._event("output_text.done", content_index=0, text=self.text, logprobs=_tokens(self._logprobs)),
            self._event("content_part.done", content_index=0, part=self._part()),
        ]


class FunctionItem(OutputItem):
    prefix = "fc"

    def __init__(self, item_id: str, index: int, call_id: str, offer: Offer) -> None:
        super().__init__(item_id, index)
        self.call_id = call_id
        self.offer = offer

    def item(self, status: str) -> JsonItem:
        fields = {"id": self.id, "type": "function_call", "call_id": self.call_id, "name": self.offer.name}
        namespace = {} if self.offer.namespace is None else {"namespace": self.offer.namespace}
        return {**fields, **namespace, "arguments": self.text, "status": status}

    def _delta(self, text: str) -> list[Event]:
        return [self._event("function_call_arguments.delta", delta=text)]

    def _done(self) -> list[Event]:
        return [self._event("function_call_arguments.done", arguments=self.text)]


class CustomItem(FunctionItem):
    """A call of a custom tool. The model writes JSON with the input, and the client gets the input itself."""

    prefix = "ctc"

    def __init__(self, item_id: str, index: int, call_id: str, offer: Offer) -> None:
        super().__init__(item_id, index, call_id, offer)
        self._decoder = InputDecoder()

    def item(self, status: str) -> JsonItem:
        fields = {"id": self.id, "type": "custom_tool_call", "call_id": self.call_id, "name": self.offer.name}
        namespace = {} if self.offer.namespace is None else {"namespace": self.offer.namespace}
        return {**fields, **namespace, "input": self.text}

    def push(self, text: str) -> None:
        super().push(self._decoder.push(text))

    def close(self, status: str) -> list[Event]:
        super().push(self._decoder.rest())
        return super().close(status)

    def _delta(self, text: str) -> list[Event]:
        return [self._event("custom_tool_call_input.delta", delta=text)]

    def _done(self) -> list[Event]:
        return [self._event("custom_tool_call_input.done", input=self.text)]


class McpItem(FunctionItem):
    """A call that the server runs. It stays open until `settle`."""

    prefix = "mcp"
    output: ToolOutput | None = None
    approved_by: str | None = None
    """The id of the approval request, if there was one."""

    def item(self, status: str) -> JsonItem:
        failed = self.output is not None and self.output.is_error
        return {
            "id": self.id,
            "type": "mcp_call",
            "server_label": self.offer.namespace,
            "name": self.offer.name,
            "arguments": self.text,
            "approval_request_id": self.approved_by,
            "output": None if self.output is None or failed else self.output.text,
            "error": _tool_error(self.output.text) if self.output is not None and failed else None,
            "status": "failed" if failed else status,
        }

    def open(self) -> list[Event]:
        return [*super().open(), self._event("mcp_call.in_progress")]

    def close(self, status: str) -> list[Event]:
        return [*self.flush(), self._event("mcp_call_arguments.done", arguments=self.text)]

    def abandon(self) -> list[Event]:
        """The call is not run."""
        return [self._event("mcp_call.failed"), self._item_event("done", "incomplete")]

    def settle(self, output: ToolOutput) -> list[Event]:
        self.output = output
        name = "mcp_call.failed" if output.is_error else "mcp_call.completed"
        return [self._event(name), self._item_event("done", "completed")]

    def _delta(self, text: str) -> list[Event]:
        return [self._event("mcp_call_arguments.delta", delta=text)]


class ApprovalItem(FunctionItem):
    """A request to approve a call. It has no events of its own, so it is sent when it is complete."""

    prefix = "mcpr"

    def item(self, status: str) -> JsonItem:
        return {
            "id": self.id,
            "type": "mcp_approval_request",
            "server_label": self.offer.namespace,
            "name": self.offer.name,
            "arguments": self.text,
        }

    def open(self) -> list[Event]:
        return []

    def close(self, status: str) -> list[Event]:
        return [self._item_event("added", status), self._item_event("done", status)]

    def _delta(self, text: str) -> list[Event]:
        return []


class ToolListItem(OutputItem):
    """The tools of an MCP server. It is complete at once."""

    def __init__(self, item_id: str, index: int, label: str, tools: Sequence[JsonItem]) -> None:
        super().__init__(item_id, index)
        self._label = label
        self._tools: Sequence[JsonItem] = ()
        self._listed = tools

    def item(self, status: str) -> JsonItem:
        return {"id": self.id, "type": "mcp_list_tools", "server_label": self._label, "tools": list(self._tools)}

    def open(self) -> list[Event]:
        return [*super().open(), self._event("mcp_list_tools.in_progress")]

    def close(self, status: str) -> list[Event]:
        self._tools = self._listed
        return [self._event("mcp_list_tools.completed"), self._item_event("done", status)]


CALLS: dict[str, type[FunctionItem]] = {"function": FunctionItem, "custom": CustomItem, "mcp": McpItem}


def _tool_error(text: str) -> JsonItem:
    return {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": text}]}


def _tokens(logprobs: Sequence[TextLogprob]) -> list[JsonItem]:
    return [_token(token, with_bytes=False) for token in logprobs]


def _token(token: TextLogprob, *, with_bytes: bool) -> JsonItem:
    """Events have no bytes, items do."""
    top = [_one(*other, with_bytes=with_bytes) for other in token.top]
    return _one(token.text, token.data, token.logprob, with_bytes=with_bytes) | {"top_logprobs": top}


def _one(text: str, data: bytes, logprob: float | None, *, with_bytes: bool) -> JsonItem:
    fields: JsonItem = {"token": text, "logprob": finite(logprob)}
    return fields | {"bytes": list(data)} if with_bytes else fields
