"""Sends responses over HTTP: whole, or as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from anyio import to_thread
from starlette.responses import Response

from millstream.api.connected import ChunkedResponse, ComputedResponse
from millstream.api.openai.responses.background import BackgroundRun
from millstream.api.openai.responses.items_out import Event
from millstream.api.openai.responses.run import ResponseRun
from millstream.api.response import Responder
from millstream.api.sse import EVENT_STREAM, event
from millstream.api.stream import Stream, StreamFormat
from millstream.errors import ContextOverflow, MillstreamError
from millstream.exact_json import dumps


def encoded(events: Sequence[Event]) -> bytes:
    return b"".join(event(dumps(each), each["type"].encode()) for each in events)


class WholeResponse(ComputedResponse):
    """Runs a response to its end, and returns its object."""

    def __init__(self, responder: Responder, run: ResponseRun) -> None:
        super().__init__(write_timeout=responder.write_timeout)
        self._run = run

    async def compute(self) -> bytes:
        run = self._run
        try:
            await run.begin()
            async for _ in run.events():
                pass
            await run.end()
        finally:
            run.close()
        if run.error is not None:
            raise run.error
        # On a thread: log-probabilities of a long text may take a while.
        return await to_thread.run_sync(dumps, run.snapshot())


class EventsResponse(ChunkedResponse):
    """Streams the events of a response as they arise."""

    stream_format: StreamFormat = EVENT_STREAM

    def __init__(self, responder: Responder, run: ResponseRun) -> None:
        super().__init__(ping_seconds=responder.ping_seconds, write_timeout=responder.write_timeout)
        self._run = run

    async def begin(self) -> None:
        try:
            await self._run.begin()
        except ContextOverflow as error:
            self._run.overflow(error)

    def attach(self, stream: Stream) -> None:
        if stream.direct is not None:
            self._run.write_to(stream.direct.ready, lambda events: stream.write_now(encoded(events)))

    async def chunks(self) -> AsyncIterator[bytes]:
        async for events in self._run.events():
            yield encoded(events)
        await self._run.end()

    def ending(self) -> bytes:
        assert self._run.final is not None
        return encoded([self._run.final])

    def failure(self, error: MillstreamError) -> bytes:
        return encoded([self._run.failure(error)])

    def stop(self, outcome: str) -> None:
        self._run.close(outcome)


class FollowingResponse(ChunkedResponse):
    """Streams the events of a background response, those of the past too. It goes on if the client leaves."""

    stream_format: StreamFormat = EVENT_STREAM

    def __init__(self, responder: Responder, run: BackgroundRun, after: int) -> None:
        super().__init__(ping_seconds=responder.ping_seconds, write_timeout=responder.write_timeout)
        self._run = run
        self._after = after

    async def begin(self) -> None:
        pass

    async def chunks(self) -> AsyncIterator[bytes]:
        async for events in self._run.follow(self._after):
            yield events

    def ending(self) -> bytes:
        return b""

    def failure(self, error: MillstreamError) -> bytes:
        return b""

    def stop(self, outcome: str) -> None:
        pass


def replayed(events: bytes, after: int) -> Response:
    """The stored events of a response that has ended, after this `sequence_number`."""
    each = events.split(b"\n\n")[after + 1 : -1]
    return Response(b"".join(one + b"\n\n" for one in each), headers={"content-type": EVENT_STREAM.media_type.decode()})
