"""Writes a response in pieces, and gives up on a client that has stopped reading."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from starlette.types import Message, Send

from millstream.api.disconnect import ClientLeft
from millstream.api.ticker import Ticker, ticker

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

    Writes are checked periodically: a timer per write would cost time on every token.
    """

    def __init__(self, send: Send, seconds: float) -> None:
        self._send = send
        self._seconds = seconds
        self.stalled = False
        self._pending = 0
        self._done = 0
        self._progress = (0, 0.0)
        """The number of writes that were done at the last check, and when it last changed."""
        self._ticker: Ticker | None = None

    async def __aenter__(self) -> Self:
        if self._seconds:
            task = asyncio.current_task()
            assert task is not None
            self._task = task
            self._cancelling = task.cancelling()
            self._progress = (0, time.monotonic())
            self._ticker = ticker(self._seconds / CHECKS)
            self._ticker.add(self._check)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ticker is not None:
            self._ticker.remove(self._check)
        # As in asyncio.timeout: undo our own cancellation, and raise only if there is no other one.
        if self.stalled and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            log.info("a client read nothing for %g s (--write-timeout): its request is cancelled", self._seconds)
            raise ClientStalled from error

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
        now = time.monotonic()
        done, since = self._progress
        if not self._pending or self._done != done:
            self._progress = (self._done, now)
        elif now - since >= self._seconds and not self.stalled:
            self.stalled = True
            self._task.cancel()
