"""The inbox of a client's request: events wait here for the task that reads them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from millstream.engine.messages import RequestEvent
from millstream.errors import OutputUnread
from millstream.service.unread_output import UnreadOutput

TURN = 32
"""The most events that a reader takes at once."""

Merge = Callable[[Sequence[RequestEvent]], list[RequestEvent]]
"""Joins events that wait together, where one costs the reader less than many."""


class Inbox:
    """The events of one client's request, which may be several requests to the engine. Read by one task.

    Only full turns count as unread: a reader that keeps up never has one waiting, so counting costs it nothing.
    """

    def __init__(self, budget: UnreadOutput, merge: Merge = list) -> None:
        self._merge = merge
        self.unread = 0
        """Roughly the bytes of the full turns."""
        self._turns: deque[tuple[list[RequestEvent], int]] = deque()
        """Full turns, each with its bytes."""
        self._events: list[RequestEvent] = []
        """The turn that is being filled."""
        self._arrived: asyncio.Future[None] | None = None
        self._error: OutputUnread | None = None
        self._on_overflow: Callable[[], None] = lambda: None
        self._budget: UnreadOutput | None = budget
        budget.open(self)

    def on_overflow(self, call: Callable[[], None]) -> None:
        """Call if so much is unread that the request ends."""
        self._on_overflow = call

    def push(self, event: RequestEvent) -> None:
        if self._error is not None:
            return
        events = self._events
        events.append(event)
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)
        if len(events) == TURN or event.may_be_large:
            self._turn_over()

    async def take(self) -> list[RequestEvent]:
        """The next events; waits for the first. A slow reader gets several steps at once, but not so many that it
        holds the event loop for long. Raises `OutputUnread` if it was too slow."""
        if self._events or self._turns:
            await asyncio.sleep(0)
        while not (self._events or self._turns):
            if self._error is not None:
                raise self._error
            self._arrived = asyncio.get_running_loop().create_future()
            try:
                await self._arrived
            finally:
                self._arrived = None
        if self._turns:
            events, size = self._turns.popleft()
            self._count(-size)
        else:
            events, self._events = self._events, []
        return events if len(events) == 1 else self._merge(events)

    def end(self, error: OutputUnread) -> None:
        """See `unread_output.Unread`."""
        self._error = error
        self.close()
        self._turns.clear()
        self._events.clear()
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)
        self._on_overflow()

    def close(self) -> None:
        """The reader has left: events here and still to come no longer count. Safe to call twice."""
        if self._budget is not None:
            self._count(-self.unread)
            self._budget.close(self)
            self._budget = None

    def _turn_over(self) -> None:
        events, self._events = self._events, []
        size = sum(event.nbytes for event in events)
        self._turns.append((events, size))
        self._count(size)
        if self._budget is not None:
            self._budget.relieve(self)

    def _count(self, size: int) -> None:
        if self._budget is not None:
            self.unread += size
            self._budget.total += size
