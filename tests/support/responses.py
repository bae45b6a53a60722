"""What tests of the Responses API share: a service with one script per generation, and strict checks of events."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any, get_args

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel

from millstream.errors import BadRequest
from millstream.model_facts import ModelCard
from millstream.service.ports import DeltaSink, ServerTool, ToolOutput
from millstream.types import CallDelta, ChatPrompt, Delta, FinishReason, GenerationRequest, Sampling, Usage

STOP, LENGTH, CALLS = FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS
Script = Sequence[Sequence[Delta] | Exception]
HELLO: Script = ((Delta(0, "Hello"),), (Delta(0, " world", finish_reason=STOP),))

_EVENTS: dict[str, type[BaseModel]] = {
    get_args(model.model_fields["type"].annotation)[0]: model for model in get_args(get_args(ResponseStreamEvent)[0])
}


class Generation:
    def __init__(self, script: Script, gate: threading.Event | None) -> None:
        self.model = "org/tiny"
        self.sampling = Sampling()
        self.usage = Usage(prompt_tokens=7)
        self.cancelled = threading.Event()
        self.ended = False
        self._script = script
        self._gate = gate

    async def __aiter__(self) -> AsyncIterator[Sequence[Delta]]:
        for step in self._script:
            if isinstance(step, Exception):
                raise step
            yield step
        while self._gate is not None and not self._gate.is_set():  # noqa: ASYNC110 - the test's thread sets it
            await asyncio.sleep(0.005)
        self.usage = Usage(7, 5, 3, 2)
        self.ended = True

    def deliver_to(self, sink: DeltaSink) -> None:
        """It is iterated only."""

    def cancel(self, outcome: str = "cancelled") -> None:
        self.cancelled.set()


class Scripts:
    """Plays one script after another; the last one again and again. `gate` holds every generation before its end."""

    def __init__(self, *scripts: Script) -> None:
        self.reset(*scripts)

    def reset(self, *scripts: Script) -> None:
        self.scripts = list(scripts) or [HELLO]
        self.requests: list[GenerationRequest] = []
        self.generations: queue.Queue[Generation] = queue.Queue()
        self.counted: list[GenerationRequest] = []
        self.busy: list[Exception] = []
        """Raised by `start`, one at a time."""
        self.gate: threading.Event | None = None
        self.limit: int | None = None
        """Characters of a prompt: beyond it, `start` raises `ContextOverflow`."""

    async def start(self, request: GenerationRequest) -> Generation:
        from millstream.errors import ContextOverflow

        self.requests.append(request)
        if self.busy:
            raise self.busy.pop()
        if self.limit is not None and _length(request) >= self.limit:
            raise ContextOverflow(f"This model's maximum context length is {self.limit} tokens.")
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        generation = Generation(script, self.gate)
        generation.sampling = request.sampling
        self.generations.put(generation)
        return generation

    async def count_tokens(self, request: GenerationRequest) -> int:
        self.counted.append(request)
        return _length(request)

    def model(self, name: str) -> ModelCard:
        return ModelCard("org/tiny", created=1, state="ready", context_length=self.limit or 1000)

    def models(self) -> Sequence[ModelCard]:
        return [self.model("")]

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Those of the last request."""
        return messages(self.requests[-1])


def messages(request: GenerationRequest) -> list[dict[str, Any]]:
    (prompt,) = request.prompts
    assert isinstance(prompt, ChatPrompt)
    return list(prompt.messages)


def _length(request: GenerationRequest) -> int:
    return sum(len(str(message["content"] or "")) for message in messages(request))


class Tools:
    """Two MCP servers: one that works, and one that is broken."""

    def __init__(self) -> None:
        self.labels = ("wiki", "broken")
        self.calls: list[tuple[str, str, dict[str, Any]]] = []

    async def tools(self, label: str) -> Sequence[ServerTool]:
        from millstream.errors import ToolServerFailed

        if label == "broken":
            raise ToolServerFailed("The MCP server 'broken' does not start.")
        if label not in self.labels:
            raise BadRequest("unknown")
        schema = {"type": "object", "properties": {"title": {"type": "string"}}}
        return [ServerTool("read page", "Reads a page", schema), ServerTool("list", "Lists pages", {})]

    async def call(self, label: str, name: str, arguments: dict[str, Any]) -> ToolOutput:
        self.calls.append((label, name, arguments))
        if name == "list":
            return ToolOutput("no list today", is_error=True)
        return ToolOutput(f"page {arguments.get('title')}")


def call(index: int, name: str, *pieces: str, call_id: str | None = None) -> list[Delta]:
    """The deltas of a call."""
    first = CallDelta(index, call_id or f"call_{index}", name)
    return [Delta(0, calls=(first,)), *(Delta(0, calls=(CallDelta(index, arguments=piece),)) for piece in pieces)]


def script(*deltas: Delta | Sequence[Delta], end: FinishReason = STOP) -> Script:
    """One batch per argument, then the end."""
    batches = [(each,) if isinstance(each, Delta) else tuple(each) for each in deltas]
    return (*batches, (Delta(0, finish_reason=end),))


def events_of(raw: bytes) -> list[dict[str, Any]]:
    """The events of a stream, whose framing is checked."""
    assert raw.endswith(b"\n\n")
    found = []
    for block in raw.split(b"\n\n")[:-1]:
        if block.startswith(b":"):
            continue
        name, data = block.split(b"\n")
        event = json.loads(data.removeprefix(b"data: "))
        assert name == b"event: " + event["type"].encode()
        found.append(event)
    return found


def check_events(events: Sequence[dict[str, Any]]) -> None:
    """Every event has exactly the fields of the official SDK, in its types, and they are in order."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        _closed(_EVENTS[event["type"]].model_validate(event), event["type"])


def check_response(response: dict[str, Any]) -> None:
    _closed(Response.model_validate(response), "response")
    assert response.keys() == Response.model_fields.keys()


def _closed(value: object, path: str) -> None:
    """No field is unknown to the SDK."""
    if isinstance(value, BaseModel):
        assert not value.model_extra, f"{path}: {value.model_extra}"
        for name in type(value).model_fields:
            _closed(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _closed(item, f"{path}[{index}]")
