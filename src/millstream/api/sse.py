"""Server-sent events, written at the ASGI level: one write for each batch, and no task or queue in between."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from millstream.api.writer import Writer

EVENT_STREAM = b"text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
_HEADERS = [
    (b"content-type", EVENT_STREAM),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would otherwise collect the tokens
]


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


class EventStream:
    """A response of events. `async with` sends the headers and keeps the line alive; `finish` comes after it."""

    def __init__(self, writer: Writer, *, ping_seconds: float) -> None:
        self._writer = writer
        self._ping_seconds = ping_seconds
        self._quiet = True

    async def __aenter__(self) -> Self:
        await self._writer.start(_HEADERS)
        self._pinger = asyncio.create_task(self._ping())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pinger.cancel()

    async def write(self, events: bytes) -> None:
        self._quiet = False
        await self._writer.body(events, more=True)

    async def finish(self, events: bytes) -> None:
        await self._writer.body(events, more=False)

    async def _ping(self) -> None:
        """A comment now and then while no token flows, so that no proxy takes a long prefill for a dead connection."""
        while True:
            await asyncio.sleep(self._ping_seconds)
            if self._quiet:
                await self._writer.body(PING, more=True)
            self._quiet = True
