"""Where the events of one client's request wait for the task that reads them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain

from millstream.engine.messages import PromptLogprobs, Tokens
from millstream.errors import OutputUnread
from millstream.service.unread_output import RequestEvent, UnreadOutput, event_bytes

TURN = 32
"""The most events that a reader takes at once."""


class Inbox:
    """The events of one client's request, which may be several of the engine's. Read by one task.

    Only full turns are counted as unread: a reader that keeps up never has one waiting, and costs nothing.
    """

    def __init__(self, budget: UnreadOutput) -> None:
        self.unread = 0
        """Bytes, about, of the full turns."""
        self._turns: deque[tuple[list[RequestEvent], int]] = deque()
        """Those that are full, and their bytes."""
        self._events: list[RequestEvent] = []
        """The turn that is being filled."""
        self._arrived: asyncio.Future[None] | None = None
        self._error: OutputUnread | None = None
        self._on_overflow: Callable[[], None] = lambda: None
        self._budget: UnreadOutput | None = budget
        budget.open(self)

    def on_overflow(self, call: Callable[[], None]) -> None:
        """Call when so much waits here that the request is ended."""
        self._on_overflow = call

    def push(self, event: RequestEvent) -> None:
        if self._error is not None:
            return
        events = self._events
        events.append(event)
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)
        if len(events) == TURN or type(event) is PromptLogprobs:  # one of these may be large by itself
            self._turn_over()

    async def take(self) -> list[RequestEvent]:
        """What has come; waits until there is something. A slow reader gets several steps at once, but not so many
        that others wait long for their turn of the event loop. Raises `OutputUnread` if it was too slow."""
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
        return events if len(events) == 1 else joined(events)

    def end(self, error: OutputUnread) -> None:
        """See `unread.Unread`."""
        self._error = error
        self.close()
        self._turns.clear()
        self._events.clear()
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)
        self._on_overflow()

    def close(self) -> None:
        """Nobody will read any more: what is here, and what may still come, counts no longer. Safe more than once."""
        if self._budget is not None:
            self._count(-self.unread)
            self._budget.close(self)
            self._budget = None

    def _turn_over(self) -> None:
        events, self._events = self._events, []
        size = sum(map(event_bytes, events))
        self._turns.append((events, size))
        self._count(size)
        if self._budget is not None:
            self._budget.relieve(self)

    def _count(self, size: int) -> None:
        if self._budget is not None:
            self.unread += size
            self._budget.total += size


def joined(events: Sequence[RequestEvent]) -> list[RequestEvent]:
    """The tokens of a request that wait together as one event: to read many at once costs little more than one."""
    found: list[RequestEvent] = []
    runs: dict[int, list[Tokens]] = {}
    whole: list[tuple[int, list[Tokens]]] = []
    for event in events:
        if not isinstance(event, Tokens):
            runs.pop(event.request_id, None)
            found.append(event)
        elif event.request_id in runs:
            runs[event.request_id].append(event)
        else:
            runs[event.request_id] = [event]
            whole.append((len(found), runs[event.request_id]))
            found.append(event)
    for place, run in whole:
        if len(run) > 1:
            tokens = chain.from_iterable(event.tokens for event in run)
            logprobs = chain.from_iterable(event.logprobs for event in run)
            found[place] = Tokens(run[0].request_id, tuple(tokens), tuple(logprobs))
    return found
