"""Responses that are made while their client is connected, whole or as a stream. If it leaves, the work ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable

from anyio import to_thread
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from millstream.api.disconnect import DEPARTURE, WhileConnected
from millstream.api.errors import JSON_TYPE
from millstream.api.stream import DIRECT_WRITER, STREAM_ERROR, Stream, StreamFormat
from millstream.api.writer import Writer
from millstream.errors import MillstreamError


class ComputedResponse(Response, ABC):
    """A whole response, which takes a while."""

    content_type = JSON_TYPE

    def __init__(self, *, write_timeout: float) -> None:
        super().__init__()
        self._write_timeout = write_timeout

    @abstractmethod
    async def compute(self) -> bytes:
        """Returns the body. Is cancelled if the client leaves."""

    async def on_thread(self, render: Callable[[], bytes]) -> bytes:
        """For bodies that are too large to be rendered on the event loop."""
        return await to_thread.run_sync(render)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with WhileConnected(receive, scope.get(DEPARTURE)):
            body = await self.compute()
        async with Writer(send, self._write_timeout) as writer:
            await writer.start(Response(body, media_type=self.content_type).raw_headers)
            await writer.body(body, more=False)


class ChunkedResponse(Response, ABC):
    """A streamed response. Nothing is sent before `begin` returns, so its errors are plain HTTP errors."""

    background = None

    def __init__(self, *, ping_seconds: float, write_timeout: float) -> None:
        # Not `Response.__init__`, which renders a body and headers that nobody sends.
        self._ping_seconds = ping_seconds
        self._write_timeout = write_timeout

    @property
    @abstractmethod
    def stream_format(self) -> StreamFormat:
        """Is asked after `begin`."""

    @abstractmethod
    async def begin(self) -> None:
        """Prepares the stream."""

    def opening(self) -> bytes:
        """The first chunk, if there is one at once."""
        return b""

    def attach(self, stream: Stream) -> None:
        """Is called before the first chunk, for responses that write to the stream by themselves while `chunks` has
        nothing."""

    @abstractmethod
    def chunks(self) -> AsyncIterator[bytes]:
        """All chunks but the last."""

    @abstractmethod
    def ending(self) -> bytes:
        """The last chunk, after all others."""

    @abstractmethod
    def failure(self, error: MillstreamError) -> bytes | None:
        """The last chunk of a stream that failed. None: the format has no way to say it, so the response stays
        incomplete, and the client sees that its connection broke."""

    @abstractmethod
    def stop(self, outcome: str) -> None:
        """Ends the work. Is called in any case, also if all went well. `outcome`: its label in metrics."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with Writer(send, self._write_timeout) as writer:
            async with WhileConnected(receive, scope.get(DEPARTURE)):
                try:
                    await self.begin()
                    scope[STREAM_ERROR] = self.failure
                    direct = scope.get(DIRECT_WRITER)
                    stream = Stream(writer, self.stream_format, ping_seconds=self._ping_seconds, direct=direct)
                    async with stream:
                        self.attach(stream)
                        if opening := self.opening():
                            await stream.write(opening)
                        async for chunk in self.chunks():
                            await stream.write(chunk)
                    ending = self.ending()
                finally:
                    self.stop("stalled" if writer.stalled else "cancelled")
            await stream.finish(ending)
