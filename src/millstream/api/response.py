"""Responses to generation requests, streamed or whole. Endpoints differ only by their renderer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Self

from anyio import to_thread
from starlette.responses import Response

from millstream.api.background import BackgroundTasks
from millstream.api.connected import ChunkedResponse, ComputedResponse
from millstream.api.render import Renderer, RendererFactory
from millstream.api.stream import Stream, StreamFormat
from millstream.errors import MillstreamError
from millstream.service.ports import Generation, GenerationService, Services
from millstream.types import Delta, GenerationRequest

MANY_LOGPROBS = 1_000
"""Positions with log-probabilities that are rendered on the event loop: with 20 top tokens each, some 20 ms."""


class _Starter:
    """Starts one generation, once. Then it drops the request: it may hold megabytes of media, and the generation may
    take long."""

    def __init__(self, service: GenerationService, request: GenerationRequest) -> None:
        self._service = service
        self._request: GenerationRequest | None = request

    async def start(self) -> Generation:
        request, self._request = self._request, None
        assert request is not None
        return await self._service.start(request)


class GenerationResponse(ComputedResponse):
    """A whole response. The generation starts, runs and ends in here, so no code path leaves one running."""

    def __init__(
        self, service: GenerationService, request: GenerationRequest, renderer: RendererFactory, *, write_timeout: float
    ) -> None:
        super().__init__(write_timeout=write_timeout)
        self._starter = _Starter(service, request)
        self._renderer = renderer

    async def compute(self) -> bytes:
        generation = await self._starter.start()
        try:
            return await self._collect(generation, self._renderer(generation.model))
        finally:
            generation.cancel()

    async def _collect(self, generation: Generation, renderer: Renderer) -> bytes:
        deltas = [delta async for batch in generation for delta in batch]
        if _is_large(deltas):
            return await to_thread.run_sync(renderer.whole, deltas, generation.usage)
        return renderer.whole(deltas, generation.usage)


class _StreamSink:
    """Renders deltas as they are delivered, and writes them to the stream."""

    def __init__(self, stream: Stream, renderer: Renderer) -> None:
        assert stream.direct is not None
        self.ready = stream.direct.ready
        self._write = stream.write_now
        self._render = renderer.chunks

    def deliver(self, deltas: Sequence[Delta]) -> None:
        if chunks := self._render(deltas):
            self._write(chunks)


class _Chunks:
    """What of a generation was not delivered to the sink. Not an async generator: the event loop registers each of
    these, to close it."""

    def __init__(self, generation: Generation, renderer: Renderer) -> None:
        self._batches = generation.__aiter__()
        self._renderer = renderer

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        render = self._renderer.chunks
        while True:
            batch = await self._batches.__anext__()
            if chunks := await to_thread.run_sync(render, batch) if _is_large(batch) else render(batch):
                return chunks


class StreamedResponse(ChunkedResponse):
    """A streamed response. Nothing is sent before the generation is accepted, so errors until then are plain."""

    def __init__(
        self,
        service: GenerationService,
        request: GenerationRequest,
        renderer: RendererFactory,
        *,
        ping_seconds: float,
        write_timeout: float,
    ) -> None:
        super().__init__(ping_seconds=ping_seconds, write_timeout=write_timeout)
        self._starter = _Starter(service, request)
        self._make_renderer = renderer
        self._generation: Generation | None = None

    @property
    def stream_format(self) -> StreamFormat:
        return self._renderer.stream_format

    async def begin(self) -> None:
        self._generation = await self._starter.start()
        self._renderer = self._make_renderer(self._generation.model)

    def attach(self, stream: Stream) -> None:
        assert self._generation is not None
        if stream.direct is not None:
            self._generation.deliver_to(_StreamSink(stream, self._renderer))

    def opening(self) -> bytes:
        assert self._generation is not None
        return self._renderer.opening(self._generation.usage)

    def chunks(self) -> AsyncIterator[bytes]:
        assert self._generation is not None
        return _Chunks(self._generation, self._renderer)

    def ending(self) -> bytes:
        assert self._generation is not None
        return self._renderer.ending(self._generation.usage)

    def failure(self, error: MillstreamError) -> bytes:
        return self._renderer.failure(error)

    def stop(self, outcome: str) -> None:
        if self._generation is not None:
            self._generation.cancel(outcome)


def _is_large(deltas: Sequence[Delta]) -> bool:
    """True if a thread should render them: log-probabilities of a long prompt or completion."""
    count = 0
    for delta in deltas:
        count += len(delta.logprobs) + len(delta.prompt)
    return count > MANY_LOGPROBS


@dataclass(frozen=True, slots=True)
class Responder:
    """Makes the response to a generation request of any dialect."""

    services: Services
    ping_seconds: float
    write_timeout: float
    background: BackgroundTasks = field(default_factory=BackgroundTasks)
    """Work that outlives its request."""

    def respond(self, request: GenerationRequest, renderer: RendererFactory, *, stream: bool) -> Response:
        if not stream:
            return GenerationResponse(self.services.generation, request, renderer, write_timeout=self.write_timeout)
        return StreamedResponse(
            self.services.generation,
            request,
            renderer,
            ping_seconds=self.ping_seconds,
            write_timeout=self.write_timeout,
        )
