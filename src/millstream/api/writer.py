"""Writes a response in pieces, and gives up on a client that has stopped reading."""

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
"""Bytes per write. The server delays a write while that many bytes of earlier ones are unsent. A body in one piece
would never be delayed, and would stay in memory for as long as its client likes."""
CHECKS = 4
"""How often a client is checked within its timeout."""


class ClientStalled(ClientLeft):
    """The client is connected but reads nothing. No error is sent: that write would wait as well."""


class Writer:
    """Wraps `send`. Within `async with`, a write that makes no progress for `seconds` cancels the block and raises
    `ClientStalled`. 0 seconds disables this.

    One timer checks periodically: a timer per write would cost time on every token.
    """

    def __init__(self, send: Send, seconds: float) -> None:
        self._send = send
        self._seconds = seconds
        self._deadline = asyncio.timeout(None)
        self._pending = 0
        self._done = 0
        self._progress = (0, 0.0)
        """The number of writes that were done at the last check, and when it last changed."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def stalled(self) -> bool:
        return self._deadline.expired()

    async def __aenter__(self) -> Self:
        await self._deadline.__aenter__()
        if self._seconds:
            self._check()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        try:
            await self._deadline.__aexit__(kind, error, trace)
        except TimeoutError as timeout:
            log.info("a client read nothing for %g s (--write-timeout): its request is cancelled", self._seconds)
            raise ClientStalled from timeout

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

    def _check(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        done, since = self._progress
        if not self._pending or self._done != done:
            self._progress = (self._done, now)
        elif now - since >= self._seconds:
            self._deadline.reschedule(now)
            return
        self._timer = loop.call_later(self._seconds / CHECKS, self._check)
