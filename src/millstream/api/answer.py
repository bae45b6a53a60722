"""One way of answering for every endpoint, streamed or whole; an endpoint differs only by its renderer."""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from millstream.api.disconnect import WhileConnected
from millstream.api.errors import JSON_TYPE
from millstream.api.render import Merger, Renderer, RendererFactory
from millstream.api.sse import EventStream
from millstream.api.writing import Writer
from millstream.service.ports import Generation, TextService
from millstream.types import GenerationRequest


class Answer(Response):
    """A whole answer. The generation starts, runs and ends in here, so no path leaves one running behind."""

    def __init__(
        self, service: TextService, request: GenerationRequest, renderer: RendererFactory, *, write_timeout: float
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
        return renderer.whole(merger.deltas(), generation.usage)


class StreamedAnswer(Answer):
    """The same as events. An error of `start` is still a plain HTTP error: nothing has been sent before it returns."""

    def __init__(
        self,
        service: TextService,
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
                if events := renderer.chunks(batch):
                    await stream.write(events)
        return renderer.ending(generation.usage)


def answer(
    service: TextService,
    request: GenerationRequest,
    renderer: RendererFactory,
    *,
    stream: bool,
    ping_seconds: float,
    write_timeout: float,
) -> Answer:
    if stream:
        return StreamedAnswer(service, request, renderer, ping_seconds=ping_seconds, write_timeout=write_timeout)
    return Answer(service, request, renderer, write_timeout=write_timeout)
