"""The asyncio face of an engine: posts commands, and sorts the events that come back by request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from millstream.engine.link import Link
from millstream.engine.messages import (
    Cancel,
    Event,
    Failed,
    Finished,
    Loaded,
    LoadFailed,
    Shutdown,
    Stopped,
    Submit,
    Tokens,
)
from millstream.errors import EngineGone, ModelError
from millstream.service.admission import Admission
from millstream.types import ModelFacts

log = logging.getLogger(__name__)

TURN = 32
"""The most events that a reader takes at once."""

RequestEvent = Tokens | Finished | Failed


class Inbox:
    """The events of one client's request, which may be several of the engine's. Read by one task."""

    def __init__(self) -> None:
        self._events: list[RequestEvent] = []
        self._arrived: asyncio.Future[None] | None = None

    def push(self, event: RequestEvent) -> None:
        self._events.append(event)
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    async def take(self) -> list[RequestEvent]:
        """What has come; waits until there is something. A slow reader gets several steps at once, but not so many
        that others wait long for their turn of the event loop."""
        if self._events:
            await asyncio.sleep(0)
        while not self._events:
            self._arrived = asyncio.get_running_loop().create_future()
            try:
                await self._arrived
            finally:
                self._arrived = None
        events, self._events = self._events[:TURN], self._events[TURN:]
        return events


class EngineClient:
    """All methods run on the event loop, and none of them waits for a step."""

    def __init__(self, link: Link, admission: Admission) -> None:
        self._link = link
        self.admission = admission
        self._inboxes: dict[int, Inbox] = {}
        self._loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[ModelFacts] = self._loop.create_future()
        self._stopped = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def gone(self) -> bool:
        """The engine has ended, by order or by a crash."""
        return self._stopped.is_set()

    async def load(self) -> ModelFacts:
        """Start the engine and wait for its model. Raises `ModelError`."""
        self._link.start_soon(self._sink())
        facts = await asyncio.shield(self._loaded)
        self.admission.set_rows(facts.max_rows)
        return facts

    def submit(self, submits: Sequence[Submit], inbox: Inbox) -> None:
        """Admit and post all, or raise and post none."""
        self.admission.admit(len(submits))
        for number, submit in enumerate(submits):
            self._inboxes[submit.request_id] = inbox
            self._idle.clear()
            try:
                self._link.post_soon(submit)
            except EngineGone:
                self._abandon(submits, number)
                raise

    def cancel(self, request_ids: Sequence[int]) -> None:
        """Ask for these to be dropped before the next step; an engine that is gone has dropped them already."""
        for request_id in request_ids:
            if request_id in self._inboxes:
                self._post_if_open(Cancel(request_id))

    async def drained(self) -> None:
        """Returns when no request is left."""
        await self._idle.wait()

    async def stop(self, reason: str, patience: float) -> bool:
        """End the engine; true if it freed its model within `patience` seconds, false if it hangs in a step."""
        self._post_if_open(Shutdown(reason))
        try:
            await asyncio.wait_for(self._stopped.wait(), patience)
        except TimeoutError:
            return False
        return await asyncio.to_thread(self._link.join, patience)

    def _sink(self) -> Callable[[Sequence[Event]], None]:
        def deliver(events: Sequence[Event]) -> None:
            try:
                self._loop.call_soon_threadsafe(self._receive, events)
            except RuntimeError:
                # The loop is closed: the server has gone without waiting for a hung engine. Nobody is left to tell.
                log.warning("%d events came after the end of the server", len(events))

        return deliver

    def _receive(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case Tokens():
                    self._inboxes[event.request_id].push(event)
                case Finished() | Failed():
                    self.admission.release()
                    self._inboxes.pop(event.request_id).push(event)
                case Loaded():
                    self._loaded.set_result(event.facts)
                case LoadFailed():
                    self._loaded.set_exception(ModelError(event.message))
                case Stopped():
                    self._stopped.set()
        if not self._inboxes:
            self._idle.set()

    def _post_if_open(self, command: Cancel | Shutdown) -> None:
        try:
            self._link.post_soon(command)
        except EngineGone:
            log.debug("the engine is gone; %s is not needed", command)

    def _abandon(self, submits: Sequence[Submit], posted: int) -> None:
        """The engine closed while `submits` were being posted: those already posted will be failed by it."""
        for submit in submits[posted:]:
            self.admission.release()
            self._inboxes.pop(submit.request_id, None)
        if not self._inboxes:
            self._idle.set()
