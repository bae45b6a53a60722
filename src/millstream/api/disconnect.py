"""Detects that a client has disconnected, even while there is nothing to send."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from starlette.types import Receive


class ClientLeft(Exception):
    """The client disconnected before its response was complete, so no response is sent."""


DEPARTURE = "millstream.departure"
"""Key of the ASGI scope: the `Departure` of the client, if the server has one."""


class Departure(Protocol):
    """Tells when the client of a request leaves, without a task that waits for it."""

    def watch(self, call: Callable[[], None]) -> None:
        """Calls it once if the client leaves, soon if it has left. The body of the request must have been read."""
        ...

    def unwatch(self) -> None:
        """From now on it is not called."""
        ...


class WhileConnected:
    """Runs a block while the client is connected. If the client disconnects, cancels the block and raises `ClientLeft`.

    Use it once the body has been read: from then on `receive` reports nothing but the disconnect. Without a
    `departure`, a watcher task waits for that. The task of the block is cancelled: it stops at whatever it awaits (a
    model being loaded, the next token, a full socket) and runs its `finally`. Leave the block before the last byte is
    sent: servers also report a disconnect after a complete response.
    """

    def __init__(self, receive: Receive, departure: Departure | None = None) -> None:
        self._receive = receive
        self._departure = departure
        self._watcher: asyncio.Task[None] | None = None
        self._left = False

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        if self._departure is not None:
            self._departure.watch(self._leave)
        else:
            self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._departure is not None:
            self._departure.unwatch()
        if self._watcher is not None:
            self._watcher.cancel()
        # As in asyncio.timeout: undo our own cancellation, and raise ClientLeft only if there is no other one.
        if self._left and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise ClientLeft from error

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._leave()

    def _leave(self) -> None:
        self._left = True
        self._task.cancel()
