"""Responses to generation requests, streamed or whole. Endpoints differ only by their renderer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anyio import to_thread
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from millstream.api.disconnect import WhileConnected
from millstream.api.errors import JSON_TYPE
from millstream.api.render import Merger, Renderer, RendererFactory
from millstream.api.stream import STREAM_ERROR, Stream
from millstream.api.writer import Writer
from millstream.service.ports import Generation, GenerationService, Services
from millstream.types import Delta, GenerationRequest

MANY_LOGPROBS = 1_000
"""Positions with log-probabilities that are rendered on the event loop: with 20 top tokens each, some 20 ms."""


class GenerationResponse(Response):
    """A whole response. The generation starts, runs and ends in here, so no code path leaves one running."""

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
        """Call once. Drops the request: it may hold megabytes of media, and the generation may take long."""
        request, self._request = self._request, None
        assert request is not None
        return await self._service.start(request)

    async def _collect(self, generation: Generation, renderer: Renderer) -> bytes:
        merger = Merger()
        async for batch in generation:
            merger.add(batch)
        deltas = merger.deltas()
        if _is_large(deltas):
            return await to_thread.run_sync(renderer.whole, deltas, generation.usage)
        return renderer.whole(deltas, generation.usage)


class StreamedResponse(GenerationResponse):
    """A streamed response. Nothing is sent before `start` returns, so its errors are plain HTTP errors."""

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
            async with WhileConnected(receive):
                generation = await self._start()
                try:
                    renderer = self._renderer(generation.model)
                    scope[STREAM_ERROR] = renderer.failure
                    stream = Stream(writer, renderer.stream_format, ping_seconds=self._ping_seconds)
                    ending = await self._send_chunks(generation, renderer, stream)
                finally:
                    generation.cancel("stalled" if writer.stalled else "cancelled")
            await stream.finish(ending)

    async def _send_chunks(self, generation: Generation, renderer: Renderer, stream: Stream) -> bytes:
        """Returns the end of the stream, still to be sent."""
        async with stream:
            if opening := renderer.opening(generation.usage):
                await stream.write(opening)
            async for batch in generation:
                large = _is_large(batch)
                if chunks := await to_thread.run_sync(renderer.chunks, batch) if large else renderer.chunks(batch):
                    await stream.write(chunks)
        return renderer.ending(generation.usage)


def _is_large(deltas: Sequence[Delta]) -> bool:
    """True if a thread should render them: log-probabilities of a long prompt or completion."""
    return any(len(delta.logprobs) > MANY_LOGPROBS or len(delta.prompt) > MANY_LOGPROBS for delta in deltas)


@dataclass(frozen=True, slots=True)
class Responder:
    """Makes the response to a generation request of any dialect."""

    services: Services
    ping_seconds: float
    write_timeout: float

    def respond(self, request: GenerationRequest, renderer: RendererFactory, *, stream: bool) -> GenerationResponse:
        if not stream:
            return GenerationResponse(self.services.generation, request, renderer, write_timeout=self.write_timeout)
        return StreamedResponse(
            self.services.generation,
            request,
            renderer,
            ping_seconds=self.ping_seconds,
            write_timeout=self.write_timeout,
        )
