"""Background responses: they run on in the server, while clients poll them or follow their events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence

from millstream.api.background import BackgroundTasks
from millstream.api.openai.responses.frame import ENDED
from millstream.api.openai.responses.items_out import Event
from millstream.api.openai.responses.run import ResponseRun
from millstream.api.openai.responses.stored import StoredResponses
from millstream.errors import MillstreamError

log = logging.getLogger(__name__)

SERVER_STOPPED = "The server stopped before this response was complete."

Encode = Callable[[Sequence[Event]], bytes]


class BackgroundRun:
    """One running response and its events so far."""

    def __init__(self, run: ResponseRun, encode: Encode) -> None:
        self.run = run
        self.events: list[bytes] = []
        """Encoded; the place of each is its `sequence_number`."""
        self.cancelled = False
        """True once a client has cancelled it."""
        self._encode = encode
        self._working = self._ended = False
        self._news = asyncio.Event()

    async def follow(self, after: int) -> AsyncIterator[bytes]:
        """The events after this `sequence_number`, until the end."""
        sent = after + 1
        while True:
            news = self._news
            if new := self.events[sent:]:
                sent += len(new)
                yield b"".join(new)
            elif self._ended:
                return
            else:
                await news.wait()

    async def perform(self, stored: StoredResponses) -> None:
        """Runs the response to its end, which it has exactly once, and stores that. A failure or a cancellation is
        found in the response itself: no request waits for this."""
        last: Event | None = None
        try:
            await self._work()
        except asyncio.CancelledError:
            if not self.cancelled:
                last = self.run.failure(MillstreamError(SERVER_STOPPED))
        except Exception:
            log.exception("%s failed", self.run.frame.id)
            last = self.run.failure(MillstreamError("The server failed on this response."))
        self._working = False
        self.run.close()
        if self.run.status not in ENDED:
            self.run.status = "cancelled"
        await self._store_end(stored, self.run.last_event() if last is None else last)

    def cancel(self, task: asyncio.Task[None]) -> None:
        """`task` performs it. Once the work has ended nothing can change its outcome, and it is being stored."""
        if not self.cancelled and self.run.status not in ENDED:
            self.cancelled = True
            if self._working:
                task.cancel()

    async def _work(self) -> None:
        """Stores the response as it is, queued, and runs it."""
        if self.cancelled:  # before the first step of the task
            return
        self._working = True
        await self.run.store()
        async for events in self.run.events():
            self._add(events)

    async def _store_end(self, stored: StoredResponses, last: Event) -> None:
        """Followers get the last event once the response is stored. The server may stop meanwhile: what has been handed
        to the store is written."""
        events = b"".join([*self.events, self._encode([last])])
        try:
            await self.run.store()
        finally:
            try:
                await stored.put_events(self.run.frame.id, events)
            finally:
                self._ended = True
                self._add([last])

    def _add(self, events: Sequence[Event]) -> None:
        self.events += [self._encode([event]) for event in events]
        self._wake()

    def _wake(self) -> None:
        """Wakes all that wait for news, and has them wait for the next."""
        news, self._news = self._news, asyncio.Event()
        news.set()


class BackgroundRuns:
    """The running ones, by id. Those that have ended are found in the store."""

    def __init__(self, tasks: BackgroundTasks, stored: StoredResponses, encode: Encode) -> None:
        self._tasks = tasks
        self._stored = stored
        self._encode = encode
        self._running: dict[str, tuple[BackgroundRun, asyncio.Task[None]]] = {}

    def start(self, run: ResponseRun) -> BackgroundRun:
        """Raises `Overloaded`."""
        background = BackgroundRun(run, self._encode)
        task = self._tasks.start(background.perform(self._stored))
        self._running[run.frame.id] = background, task
        task.add_done_callback(lambda _: self._running.pop(run.frame.id))
        return background

    def find(self, response_id: str) -> BackgroundRun | None:
        found = self._running.get(response_id)
        return None if found is None else found[0]

    async def working(self, response_id: str) -> BackgroundRun | None:
        """One whose end is not known yet. Waits for one that is being stored: what a client is told of an end is in the
        store, so that the next response can continue it."""
        found = self._running.get(response_id)
        if found is None or found[0].run.status not in ENDED:
            return None if found is None else found[0]
        await asyncio.wait([found[1]])
        return None

    async def cancel(self, response_id: str) -> bool:
        """Returns once the response has ended. False if it is not running."""
        found = self._running.get(response_id)
        if found is None:
            return False
        background, task = found
        background.cancel(task)
        await asyncio.wait([task])
        return True
