"""The inbox of a client's request: queues engine events for the task that reads them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from millstream.engine.messages import Failed, Finished, RequestEvent, Started
from millstream.errors import BadRequest, EngineGone, MillstreamError, OutputUnread, StepFailed
from millstream.service.turnstile import turnstile
from millstream.service.unread_output import UnreadOutput

MAX_BATCH = 32
"""Events that a reader takes at once."""

Deliver = Callable[[list[RequestEvent]], list[RequestEvent]]
"""Handles events at once, and returns those that the reader must take."""

DeliverOne = Callable[[int, Any], bool]
"""Handles a small result of a request to the engine at once. Returns False if it cannot now."""

Merge = Callable[[Sequence[RequestEvent]], list[RequestEvent]]
"""Merges queued events, where one costs the reader less than many."""


def failure(event: Failed) -> MillstreamError:
    """What the reader of a failed request raises."""
    if event.refused:
        return BadRequest(event.message)
    return EngineGone(event.message) if event.gone else StepFailed(event.message)


def _wake(arrived: asyncio.Future[None]) -> None:
    """Unless it was woken by something else, or its reader was cancelled."""
    if not arrived.done():
        arrived.set_result(None)


def _nothing() -> None:
    """For requests that hold nothing but their events."""


def _ignore(event: Started) -> None:
    """For requests that nobody times."""


class Inbox:
    """The events of one client's request, which may be several requests to the engine. Read by one task.

    Only full batches count as unread: a reader that keeps up never has one waiting, so counting costs it nothing.
    """

    def __init__(self, budget: UnreadOutput, merge: Merge = list) -> None:
        self._merge = merge
        self.unread = 0
        """About how many bytes the full batches have."""
        self._batches: deque[tuple[list[RequestEvent], int]] = deque()
        """Full batches, each with its bytes."""
        self._events: list[RequestEvent] = []
        """The batch that is being filled."""
        self._arrived: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._added = self._woken = False
        self.deliver: Deliver | None = None
        """Gets the events of a step while the reader waits for them: to wake a task for each token costs more than to
        handle the token. What it raises is raised in the reader."""
        self.deliver_one: DeliverOne | None = None
        """The same for one small result: see `give`."""
        self._on_overflow: Callable[[], None] = _nothing
        self.on_started: Callable[[Started], None] = _ignore
        """Called at once, whether or not the reader keeps up: it only notes the time."""
        self._budget: UnreadOutput | None = budget
        budget.open(self)

    def on_overflow(self, call: Callable[[], None]) -> None:
        """Set the callback for a request that is ended because too much of it is unread."""
        self._on_overflow = call

    def push(self, event: RequestEvent) -> None:
        """Add an event, the only one for now."""
        self.add(event)
        self.flush()

    def add(self, event: RequestEvent) -> bool:
        """Queue an event. Returns True if it is the first since `flush`, which must be called after the last."""
        if self._error is not None:
            return False
        events = self._events
        events.append(event)
        if len(events) == MAX_BATCH or event.may_be_large:
            self._close_batch()
        first, self._added = not self._added, True
        return first

    def give(self, request_id: int, value: Any) -> bool:
        """Deliver a small result at once. Returns False if it must be added as an event: the reader is busy, or what
        came before is not delivered."""
        arrived, deliver = self._arrived, self.deliver_one
        if deliver is None or arrived is None or self._events or self._batches or self._error or arrived.done():
            return False
        try:
            taken = deliver(request_id, value)
        except Exception as error:  # noqa: BLE001 - raised in the reader, as in `flush`
            self._error = error
            taken = self._woken = True
        if self._woken:
            arrived.set_result(None)
        return taken

    def flush(self) -> None:
        """Deliver what was added, or wake the reader. A reader that is busy will take it by itself."""
        self._added = False
        arrived = self._arrived
        if arrived is None or arrived.done():
            return
        if self.deliver is not None and self._events and not self._batches:
            events, self._events = self._events, []
            try:
                self._events = self.deliver(events if len(events) == 1 else self._merge(events))
            except Exception as error:  # noqa: BLE001 - raised in the reader: it ends its request and no other
                self._error = error
            if not (self._events or self._woken or self._error):
                return
        if self._events and isinstance(self._events[-1], Finished | Failed):
            turnstile().enter(partial(_wake, arrived), begun=True)  # many may end in one step
        else:
            arrived.set_result(None)

    def wake(self) -> None:
        """For `deliver`: the reader is to go on, also if there is no event for it."""
        self._woken = True

    async def take(self) -> list[RequestEvent]:
        """Wait for events and return them; none if it was woken. A slow reader gets those of several steps at once, but
        not so many that it blocks the event loop for long. Raises `OutputUnread` if it was too slow."""
        if self._events or self._batches:
            await asyncio.sleep(0)
        while not (self._events or self._batches):
            if self._error is not None:
                raise self._error
            self._arrived = asyncio.get_running_loop().create_future()
            try:
                await self._arrived
            finally:
                self._arrived = None
            if self._woken:
                break
        self._woken = False
        if self._batches:
            events, size = self._batches.popleft()
            self._count(-size)
        else:
            events, self._events = self._events, []
        return events if len(events) == 1 else self._merge(events)

    def end(self, error: OutputUnread) -> None:
        """See `unread_output.Unread`."""
        self._error = error
        on_overflow = self._on_overflow
        self.close()
        self._batches.clear()
        self._events.clear()
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)
        on_overflow()

    def close(self) -> None:
        """The reader is done: present and later events no longer count as unread. Safe to call twice.

        Nobody is called any more. Whoever set the callbacks mostly holds this inbox: together they would stay in memory
        until the garbage collector finds them, and it stops the event loop for as long as there is garbage.
        """
        self.deliver = self.deliver_one = None
        self._on_overflow, self.on_started = _nothing, _ignore
        if self._budget is not None:
            self._count(-self.unread)
            self._budget.close(self)
            self._budget = None

    def _close_batch(self) -> None:
        events, self._events = self._events, []
        size = sum(event.nbytes for event in events)
        self._batches.append((events, size))
        self._count(size)
        if self._budget is not None:
            self._budget.check(self)

    def _count(self, size: int) -> None:
        if self._budget is not None:
            self.unread += size
            self._budget.total += size
