"""Runs a response from its plan to its end, as a sequence of events. Whole, streamed and background responses are all
made of these events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

from millstream.api.errors import printable
from millstream.api.openai.responses.builder import OutputBuilder
from millstream.api.openai.responses.context import Context, resolve, start_fitting
from millstream.api.openai.responses.frame import Frame
from millstream.api.openai.responses.items_out import Event
from millstream.api.openai.responses.mcp import McpCalls, approvals, check_labels
from millstream.api.openai.responses.request import Plan
from millstream.api.openai.responses.schema import ResponseRequest
from millstream.api.openai.responses.stored import StoredResponses, with_ids
from millstream.errors import BadRequest, ContextOverflow, EngineBusy, MillstreamError, Overloaded
from millstream.request_context import current_request
from millstream.service.ports import Generation, ServerTool, Services
from millstream.types import Delta, FinishReason, ToolUse, Usage

log = logging.getLogger(__name__)

MAX_ROUNDS = 64
"""Answers of the model within one response, each after the outputs of MCP calls."""

BUSY_SECONDS = 1
"""Between attempts to start a background response, if the engine does not say when."""


class EventSink:
    """Takes the events of deltas as they are delivered, where `events` would yield them."""

    def __init__(self, run: ResponseRun, ready: Callable[[], bool], write: Callable[[list[Event]], None]) -> None:
        self.ready = ready
        self._run = run
        self._write = write

    def deliver(self, deltas: Sequence[Delta]) -> None:
        if events := self._run.deliver(deltas):
            self._write(events)


class ResponseRun:
    """One response. `prepare`, then `begin`, then iterate `events`, then `end`; `final` is the last event.

    Errors before `events` are plain HTTP errors. An error after that makes the response fail.
    """

    def __init__(self, services: Services, stored: StoredResponses, request: ResponseRequest, plan: Plan) -> None:
        self.frame = Frame(request, plan.tools.shown)
        self.status = "queued" if request.background else "in_progress"
        self.error: MillstreamError | None = None
        self.final: Event | None = None
        self._services = services
        self._stored = stored
        self._request = request
        self._plan = plan
        sealing = "reasoning.encrypted_content" in request.include
        self._builder = OutputBuilder(
            self.frame.id, services.seal if sealing else None, summarize=request.reasoning.get("summary") is not None
        )
        self._calls = McpCalls(services.tool_servers, request.max_tool_calls)
        self._listed: dict[str, list[ServerTool]] = {}
        self._context = Context([], [], [])
        self._approved: list[dict[str, Any]] = []
        self._generation: Generation | None = None
        self._sink: EventSink | None = None
        self._reason: FinishReason | None = None
        self._begun = False
        self._overflow: ContextOverflow | None = None
        self._rounds = 0
        self._usage: Usage | None = None
        self._sequence = 0

    async def prepare(self) -> None:
        """Looks up what the request refers to. Raises `MillstreamError`."""
        check_labels(self._plan.tools.servers, self._services.tool_servers.labels)
        self._context = await resolve(self._plan, self._stored, self._services.seal)
        self._approved = approvals(self._context.items)
        labels = [server.label for server in self._plan.tools.servers]
        for request in self._approved:
            if request.get("server_label") not in labels:
                raise BadRequest(
                    f"A call of the MCP server {str(request.get('server_label'))[:64]!r} was approved, but that server "
                    "is not among the tools.",
                    param="tools",
                )

    async def begin(self) -> None:
        """Starts the first generation, unless approved calls come before it. Raises `MillstreamError`."""
        self._builder.catalog, self._listed = await self._calls.list_tools(self._plan.tools)
        self._begun = True
        if not self._approved:
            await self._start()

    def overflow(self, error: ContextOverflow) -> None:
        """Have the response fail, instead of `begin`. Codex reads this error from the stream only."""
        self._overflow = error

    def snapshot(self) -> dict[str, Any]:
        """The response object as it is now."""
        cut_off = "max_output_tokens" if self.status == "incomplete" else None
        return self.frame.render(
            self.status, self._builder.items, usage=self._usage, error=self.error, incomplete=cut_off
        )

    def write_to(self, ready: Callable[[], bool], write: Callable[[list[Event]], None]) -> None:
        """Have the events of tokens written at once while `events` waits for them, and `ready` says that they may."""
        self._sink = EventSink(self, ready, write)

    def deliver(self, deltas: Sequence[Delta]) -> list[Event]:
        """The numbered events of deltas that `events` does not get."""
        return self._numbered(self._push(deltas))

    async def events(self) -> AsyncIterator[list[Event]]:
        """All events but the last, in batches as they arise."""
        first = [self._lifecycle("created")]
        yield self._numbered([*first, self._lifecycle("queued")] if self._request.background else first)
        try:
            async for events in self._work():
                if events:
                    yield self._numbered(events)
        except MillstreamError as error:
            self._fail(error)
        finally:
            self.close()

    async def end(self) -> None:
        """Stores the response. Only then is its last event there."""
        await self.store()
        self.final = self.last_event()

    def last_event(self) -> Event:
        (event,) = self._numbered([self._lifecycle(self.status)])
        return event

    async def store(self) -> None:
        if self._request.store:
            await self._stored.put(self.snapshot(), with_ids(self._context.input, self.frame.id))

    def failure(self, error: MillstreamError) -> Event:
        """The last event, if something failed that is no part of the response itself."""
        self.status, self.error = "failed", error
        return self.last_event()

    def close(self, outcome: str = "cancelled") -> None:
        """Ends the running generation, if any. Safe at any time."""
        if self._generation is not None:
            self._generation.cancel(outcome)

    async def _work(self) -> AsyncIterator[list[Event]]:
        if self._overflow is not None:
            raise self._overflow
        if not self._begun:
            await self._begin_when_free()
        self.status = "in_progress"
        yield [self._lifecycle("in_progress"), *self._tool_lists()]
        for request in self._approved:
            item, events = self._builder.approved_call(request)
            yield events
            yield await self._calls.run([item], self._builder)
        if self._approved:
            self._builder.next_generation()
        while True:
            async for events in self._generate():
                yield events
            if self.status == "incomplete":
                return
            calls = self._builder.pending_calls()
            if calls:
                yield await self._calls.run(calls, self._builder)
            if not calls or self._builder.has_client_calls:
                break
            self._rounds += 1
            self._builder.next_generation()
        self.status = "completed"

    async def _begin_when_free(self) -> None:
        """Nobody waits for a background response, so it stays queued while the engine is full."""
        while True:
            try:
                return await self.begin()
            except (EngineBusy, Overloaded) as busy:
                await asyncio.sleep(BUSY_SECONDS if busy.retry_after is None else busy.retry_after)

    async def _generate(self) -> AsyncIterator[list[Event]]:
        """One answer of the model."""
        generation = self._generation or await self._start()
        self._reason = None
        if self._sink is not None:
            generation.deliver_to(self._sink)
        async for batch in generation:
            yield self._push(batch)
        self._generation = None
        self._usage = _sum(self._usage, generation.usage)
        cut_off = self._reason is FinishReason.LENGTH
        yield self._builder.finish(incomplete=cut_off)
        if cut_off:
            yield self._builder.abandon_calls()
            self.status = "incomplete"

    def _push(self, deltas: Sequence[Delta]) -> list[Event]:
        self._reason = next((delta.finish_reason for delta in deltas if delta.finish_reason is not None), self._reason)
        return self._builder.push(deltas)

    async def _start(self) -> Generation:
        output = self._builder.items
        messages = self._context.messages(self._request.instructions, output, self._services.seal)
        tools = self._tools()
        request = self._plan.generation(messages, tools)
        if request.max_tokens is not None and self._usage is not None:
            request = replace(request, max_tokens=max(1, request.max_tokens - self._usage.completion_tokens))
        self._generation = await start_fitting(self._services, self._plan, request, messages, tools)
        self.frame.model, self.frame.sampling = self._generation.model, self._generation.sampling
        return self._generation

    def _tools(self) -> ToolUse | None:
        """A required call is required once. After the last call that is allowed, no server may be called."""
        choice, catalog = self._plan.choice, self._builder.catalog
        if self._rounds and choice.mode == "required":
            choice = replace(choice, mode="auto")
        tools = choice.tool_use(catalog, parallel=self._request.parallel_tool_calls)
        if tools is None or not (self._calls.spent or self._rounds >= MAX_ROUNDS):
            return tools
        names = tools.schemas if tools.allowed is None else tools.allowed
        own = frozenset(name for name in names if catalog.offers[name].kind != "mcp")
        return replace(tools, choice=tools.choice if own else "none", name=None, allowed=own)

    def _tool_lists(self) -> list[Event]:
        """Servers whose tools were listed earlier in the conversation are not listed again."""
        known = {item.get("server_label") for item in self._context.items if item.get("type") == "mcp_list_tools"}
        new = [(label, tools) for label, tools in self._listed.items() if label not in known]
        return [event for label, tools in new for event in self._builder.list_tools(label, tools)]

    def _fail(self, error: MillstreamError) -> None:
        context = current_request()
        reported = context is not None and context.reported == id(error)
        if error.status >= 500 and not reported and not isinstance(error, EngineBusy | Overloaded):
            log.warning("%s failed: %s", self.frame.id, printable(error.log_reason))
        self.status, self.error = "failed", error

    def _lifecycle(self, name: str) -> Event:
        return {"type": f"response.{name}", "response": self.snapshot()}

    def _numbered(self, events: list[Event]) -> list[Event]:
        for event in events:
            event["sequence_number"] = self._sequence
            self._sequence += 1
        return events


def _sum(first: Usage | None, second: Usage) -> Usage:
    if first is None:
        return second
    return Usage(
        first.prompt_tokens + second.prompt_tokens,
        first.completion_tokens + second.completion_tokens,
        first.cached_tokens + second.cached_tokens,
        first.reasoning_tokens + second.reasoning_tokens,
        first.accepted_prediction_tokens + second.accepted_prediction_tokens,
        first.rejected_prediction_tokens + second.rejected_prediction_tokens,
        first.skipped_tokens + second.skipped_tokens,
    )
