"""One way of answering for every endpoint, streamed or whole; an endpoint differs only by its renderer."""

from __future__ import annotations

from collections.abc import Sequence

from anyio import to_thread
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from millstream.api.disconnect import WhileConnected
from millstream.api.errors import JSON_TYPE
from millstream.api.render import Merger, Renderer, RendererFactory
from millstream.api.sse import EventStream
from millstream.api.writer import Writer
from millstream.service.ports import Generation, GenerationService
from millstream.types import Delta, GenerationRequest

MANY_LOGPROBS = 1_000
"""Places with log-probabilities that are rendered on the event loop: with 20 of the likeliest each, some 20 ms."""


class GenerationResponse(Response):
    """A whole answer. The generation starts, runs and ends in here, so no path leaves one running behind."""

    def __init__(
        self, service: GenerationService, request: GenerationRequest, renderer: RendererFactory, *, write_timeout: float
    ) -> None:
        super().__init__()
        self._write_timeout = write_timeout
        self._service = service
        self._request: GenerationRequest | None = request
        self._renderer = renderer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with WhileConnected(receive):
            generation = await self._start()
            try:
                body = await self._collect(generation, self._renderer(generation.model))
            finally:
                generation.cancel()
        async with Writer(send, self._write_timeout) as writer:
            await writer.start(Response(body, media_type=JSON_TYPE).raw_headers)
            await writer.body(body, more=False)

    async def _start(self) -> Generation:
        """Once. The request is let go: it may hold megabytes of media, and its answer may take long."""
        request, self._request = self._request, None
        assert request is not None
        return await self._service.start(request)

    async def _collect(self, generation: Generation, renderer: Renderer) -> bytes:
        merger = Merger()
        async for batch in generation:
            merger.add(batch)
        deltas = merger.deltas()
        if _is_much(deltas):
            return await to_thread.run_sync(renderer.whole, deltas, generation.usage)
        return renderer.whole(deltas, generation.usage)


class StreamedResponse(GenerationResponse):
    """The same as events. An error of `start` is still a plain HTTP error: nothing has been sent before it returns."""

    def __init__(
        self,
        service: GenerationService,
        request: GenerationRequest,
        renderer: RendererFactory,
        *,
        ping_seconds: float,
        write_timeout: float,
    ) -> None:
        super().__init__(service, request, renderer, write_timeout=write_timeout)
        self._ping_seconds = ping_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with Writer(send, self._write_timeout) as writer:
            stream = EventStream(writer, ping_seconds=self._ping_seconds)
            async with WhileConnected(receive):
                generation = await self._start()
                try:
                    ending = await self._pour(generation, self._renderer(generation.model), stream)
                finally:
                    generation.cancel("stalled" if writer.stalled else "cancelled")
            await stream.finish(ending)

    async def _pour(self, generation: Generation, renderer: Renderer, stream: EventStream) -> bytes:
        async with stream:
            async for batch in generation:
                much = _is_much(batch)
                if events := await to_thread.run_sync(renderer.chunks, batch) if much else renderer.chunks(batch):
                    await stream.write(events)
        return renderer.ending(generation.usage)


def _is_much(deltas: Sequence[Delta]) -> bool:
    """So much to write that a thread should do it: log-probabilities of a long prompt or answer."""
    return any(len(delta.logprobs) > MANY_LOGPROBS or len(delta.prompt) > MANY_LOGPROBS for delta in deltas)


def respond(
    service: GenerationService,
    request: GenerationRequest,
    renderer: RendererFactory,
    *,
    stream: bool,
    ping_seconds: float,
    write_timeout: float,
) -> GenerationResponse:
    if stream:
        return StreamedResponse(service, request, renderer, ping_seconds=ping_seconds, write_timeout=write_timeout)
    return GenerationResponse(service, request, renderer, write_timeout=write_timeout)
