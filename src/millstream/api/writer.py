"""Writes to a client that may have stopped reading: in pieces, and not for ever."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from starlette.types import Message, Send

from millstream.api.disconnect import ClientLeft

log = logging.getLogger(__name__)

PIECE = 64 * 1024
"""Bytes a write. The server holds back a write while so much of those before it is not taken: a body in one piece would
never be held back, and stay in memory for as long as its client likes."""
LOOKS = 4
"""How often in the time that a client has is looked after it."""


class ClientStalled(ClientLeft):
    """The client is there, and takes nothing. Nobody is there to be told: that would wait as well."""


class Writer:
    """A `send` for answers. Within `async with`, a write that waits for `seconds` while nothing is taken cancels the
    block, and `ClientStalled` is raised. 0 seconds: never.

    A timer looks now and then: one for each write would cost every token.
    """

    def __init__(self, send: Send, seconds: float) -> None:
        self._send = send
        self._seconds = seconds
        self._deadline = asyncio.timeout(None)
        self._pending = 0
        self._done = 0
        self._seen = (0, 0.0)
        """How many writes were done, and since when there were not more."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def stalled(self) -> bool:
        return self._deadline.expired()

    async def __aenter__(self) -> Self:
        await self._deadline.__aenter__()
        if self._seconds:
            self._look()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        try:
            await self._deadline.__aexit__(kind, error, trace)
        except TimeoutError as late:
            log.info("a client took nothing for %g s (--write-timeout): its request ends", self._seconds)
            raise ClientStalled from late

    async def start(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        await self._write({"type": "http.response.start", "status": 200, "headers": headers})

    async def body(self, data: bytes, *, more: bool) -> None:
        last = (len(data) - 1) // PIECE * PIECE if len(data) > PIECE else 0
        for start in range(0, last, PIECE):
            piece = data[start : start + PIECE]
            await self._write({"type": "http.response.body", "body": piece, "more_body": True})
        await self._write({"type": "http.response.body", "body": data[last:], "more_body": more})

    async def _write(self, message: Message) -> None:
        self._pending += 1
        await self._send(message)
        self._pending -= 1
        self._done += 1

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        done, since = self._seen
        if not self._pending or self._done != done:
            self._seen = (self._done, now)
        elif now - since >= self._seconds:
            self._deadline.reschedule(now)
            return
        self._timer = loop.call_later(self._seconds / LOOKS, self._look)
