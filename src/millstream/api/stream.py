"""Streams a response at the ASGI level: one write per batch, without a task or a queue in between."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from millstream.api.ticker import Ticker, ticker
from millstream.api.writer import Writer

CHECKS = 4
"""How often it is checked in the seconds of a ping whether one is due."""
STREAM_ERROR = "millstream.stream_error"
"""Key of the ASGI scope. A response that has begun to stream puts a function there that renders an error as the last
bytes of its stream, and the edge calls it. It may return None: then the stream stays incomplete."""


DIRECT_WRITER = "millstream.direct_writer"
"""Key of the ASGI scope: the `DirectWriter` of the response, if the server has one."""


class DirectWriter(Protocol):
    """Writes to the body of a response that has begun, without a task and without the layers around `send`."""

    def ready(self) -> bool:
        """Whether the client is connected and reads what it gets."""
        ...

    def write(self, data: bytes) -> None:
        """Only while it is ready."""
        ...


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """What a stream says about itself on the wire, whatever its chunks hold."""

    media_type: bytes
    ping: bytes = b""
    """Sent while no token flows, so that no proxy takes a long prefill for a dead connection. Empty: no pings."""


class Stream:
    """A streamed response. `async with` sends the headers and pings; call `finish` after it."""

    def __init__(
        self, writer: Writer, form: StreamFormat, *, ping_seconds: float, direct: DirectWriter | None = None
    ) -> None:
        self.direct = direct
        self._writer = writer
        self._form = form
        self._ping_seconds = ping_seconds
        self._quiet = 0
        """Checks since the last write."""
        self._ticker: Ticker | None = None
        self._pinging: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._writer.start(
            [
                (b"content-type", self._form.media_type),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),  # otherwise nginx buffers the tokens
            ]
        )
        if self._form.ping:
            self._ticker = ticker(self._ping_seconds / CHECKS)
            self._ticker.add(self._check)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ticker is not None:
            self._ticker.remove(self._check)
        if self._pinging is not None:
            self._pinging.cancel()

    async def write(self, chunks: bytes) -> None:
        self._quiet = 0
        await self._writer.body(chunks, more=True)

    def write_now(self, chunks: bytes) -> None:
        """Only while `direct` is ready."""
        assert self.direct is not None
        self._quiet = 0
        self.direct.write(chunks)

    async def finish(self, chunks: bytes) -> None:
        await self._writer.body(chunks, more=False)

    def _check(self) -> None:
        """A task only to ping: most streams need none. The first check may come at once, so one more is counted."""
        self._quiet += 1
        if self._quiet > CHECKS and (self._pinging is None or self._pinging.done()):
            self._quiet = 1  # this check is due when the ping is sent
            self._pinging = asyncio.create_task(self._writer.body(self._form.ping, more=True))
