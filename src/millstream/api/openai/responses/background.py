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

Encode = Callable[[Sequence[Event]], bytes]


class BackgroundRun:
    """One running response and its events so far."""

    def __init__(self, run: ResponseRun, encode: Encode) -> None:
        self.run = run
        self.events: list[bytes] = []
        """Encoded; the place of each is its `sequence_number`."""
        self._encode = encode
        self._ended = False
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
        """Stores the response as it is, queued, and runs it to its end. A failure is found in the response itself."""
        try:
            await self.run.store()
            async for events in self.run.events():
                self._add(events)
            assert self.run.final is not None
            self._add([self.run.final])
        except Exception:  # no request waits for this: the response itself has to tell
            log.exception("%s failed", self.run.frame.id)
            self._add([self.run.failure(MillstreamError("The server failed on this response."))])
            await self.run.store()
        finally:
            self.run.close()
            self._end()
        await stored.put_events(self.run.frame.id, b"".join(self.events))

    async def cancelled(self, stored: StoredResponses) -> None:
        """Call it once the task has ended. A task that is cancelled early has not even begun to `perform`."""
        if self.run.status in ENDED:
            return
        self.run.status = "cancelled"
        self._end()
        await self.run.store()
        await stored.put_events(self.run.frame.id, b"".join(self.events))

    def _end(self) -> None:
        self._ended = True
        self._wake()

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

    async def cancel(self, response_id: str) -> bool:
        """Returns once the response has ended. False if it is not running."""
        found = self._running.get(response_id)
        if found is None:
            return False
        background, task = found
        task.cancel()
        await asyncio.wait([task])
        await background.cancelled(self._stored)
        return True
