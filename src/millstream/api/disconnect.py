"""Noticing that a client has left, also while there is nothing to send to it."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from starlette.types import Receive


class ClientLeft(Exception):
    """The client closed its connection before its answer was complete. Nobody is there to be told."""


class WhileConnected:
    """Runs a block for as long as the client stays; when it leaves, the block is cancelled and `ClientLeft` raised.

    For use once the body has been read: from then on `receive` has only the disconnect to report. A watcher task waits
    for it and cancels the task of the block, which therefore stops at whatever it awaits (a model being loaded, the
    next token, a full socket) and runs its `finally`. Leave the block before the last byte is sent: servers report
    a disconnect after a complete answer too.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._left = False

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watcher.cancel()
        # As in asyncio.timeout: take our own cancellation back, and turn it into ClientLeft only if it is the sole one.
        if self._left and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise ClientLeft from error

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._left = True
        self._task.cancel()
