"""The asyncio side of an engine: posts commands, and routes events to the inboxes of their requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from millstream.deadline import Deadline
from millstream.engine.link import Link
from millstream.engine.messages import (
    Cancel,
    Command,
    Event,
    Failed,
    Finished,
    Loaded,
    LoadFailed,
    Loading,
    Measured,
    Output,
    Outputs,
    RequestEvent,
    Shutdown,
    Speculated,
    Started,
    Stopped,
    Submit,
)
from millstream.errors import DeviceLost, EngineDied, EngineGone, ModelError
from millstream.model_facts import LoadProgress, ModelFacts
from millstream.service.admission import Admission
from millstream.service.inbox import Inbox, Merge
from millstream.service.turnstile import turnstile
from millstream.service.unread_output import UnreadOutput

log = logging.getLogger(__name__)

ABORT_SECONDS = 1.0
"""How long an engine may take to stop by itself when its load is aborted, which has nothing worth saving."""

CHECK_SECONDS, MAX_STOPPED_CHECKS = 1.0, 10
"""While a model loads, a process that a signal has stopped is killed after this many checks, one per interval."""


class EngineClient:
    """All methods run on the event loop. None waits for a step."""

    def __init__(
        self,
        link: Link,
        admission: Admission,
        *,
        on_progress: Callable[[LoadProgress], None] = lambda progress: None,
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_progress` gets the progress of the load; `on_idle` is called whenever the last request has ended."""
        self.link = link
        self.admission = admission
        self.memory_bytes = self.cache_bytes = self.disk_bytes = 0
        self.kv_tokens: int | None = None
        self.speculated: Speculated | None = None
        self.answered = False
        """True once a request has finished."""
        self.cause: str | None = None
        """Why the engine stopped, if it was not asked to."""
        self._on_progress = on_progress
        self._on_idle = on_idle
        self._inboxes: dict[int, Inbox] = {}
        self._steps: deque[Sequence[Event]] = deque()
        """Events that the engine has emitted, each step's together."""
        self._scheduled = False
        """True from when a step asks the event loop to take the steps until it does."""
        self._loop = asyncio.get_running_loop()
        self._turnstile = turnstile()
        self._loaded: asyncio.Future[ModelFacts] = self._loop.create_future()
        self._loaded.add_done_callback(_retrieve_error)
        self._stopped = asyncio.Event()
        self._disowned = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def busy(self) -> bool:
        return bool(self._inboxes)

    @property
    def gone(self) -> bool:
        """True if the engine has stopped, by request or by a crash."""
        return self._stopped.is_set()

    async def wait_gone(self) -> str | None:
        """Returns when the engine has stopped: None if it was asked to, else the reason."""
        await self._stopped.wait()
        return self.cause

    async def load(self) -> ModelFacts:
        """Start the engine and wait for its model. Raises `ModelError` if it cannot be loaded, `EngineDied` if that
        may not be the model's fault."""
        try:
            self.link.start_soon(self._sink(), self._loop)
        except BaseException:
            self._stopped.set()  # nothing was started
            raise
        checks = 0
        while not self._loaded.done():
            await asyncio.wait([self._loaded], timeout=CHECK_SECONDS)
            checks = checks + 1 if self.link.stopped() else 0
            if checks == MAX_STOPPED_CHECKS:
                self.link.kill("the engine's process was stopped by a signal while it loaded the model")
        facts = self._loaded.result()
        self.admission.set_capacity(facts.capacity)
        return facts

    async def abort_load(self, reason: str, patience: float) -> None:
        """Stop an engine whose load failed or was cancelled. A process that does not end is killed."""
        self._post_if_open(Shutdown(reason))
        if not await self._stops_within(min(ABORT_SECONDS, patience)):
            self.link.kill(reason)
            if not await self._stops_within(patience):
                self.disown(reason)
                return
        await asyncio.to_thread(self.link.join, patience)

    def open_inbox(
        self,
        submits: Sequence[Submit],
        unread: UnreadOutput,
        *,
        merge: Merge = list,
        on_started: Callable[[Started], None] = lambda event: None,
    ) -> Inbox:
        """Submit all requests of one client. Their events come to the inbox, which the caller must end with
        `close_inbox`. Raises what `submit` raises: then nothing is open."""
        inbox = Inbox(unread, merge)
        inbox.on_started = on_started
        try:
            self.submit(submits, inbox)
        except BaseException:
            inbox.close()
            raise
        return inbox

    def close_inbox(self, request_ids: Sequence[int], inbox: Inbox) -> None:
        """Cancel what is left of these requests, and drop their events. Safe at any time and more than once."""
        self.cancel(request_ids)
        inbox.close()

    def submit(self, submits: Sequence[Submit], inbox: Inbox) -> None:
        """Admit and post all requests. Raises `EngineBusy` or `BadRequest` and posts none if they are not admitted."""
        self.admission.admit([submit.request_id for submit in submits])
        for number, submit in enumerate(submits):
            self._inboxes[submit.request_id] = inbox
            self._idle.clear()
            try:
                self.link.post_soon(submit)
            except EngineGone:
                self._abandon(submits, number)
                raise

    def cancel(self, request_ids: Sequence[int]) -> None:
        """Cancel these requests before the next step. Does nothing if the engine is gone, which has ended them."""
        for request_id in request_ids:
            if request_id in self._inboxes:
                self._post_if_open(Cancel(request_id))

    def post(self, command: Command) -> None:
        """Post a command of the engine's kind. Ignored if the engine is gone."""
        self._post_if_open(command)

    async def drained(self) -> None:
        """Returns when no request is left."""
        await self._idle.wait()

    async def stop(self, reason: str, patience: float) -> bool:
        """Stop the engine. Returns True if it freed its model within `patience` seconds, False if it hangs."""
        if self._disowned:
            return False
        end = Deadline(patience)
        self._post_if_open(Shutdown(reason))
        if not await self._stops_within(end.left):
            return False
        return await asyncio.to_thread(self.link.join, end.left)

    async def _stops_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._stopped.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def disown(self, reason: str) -> None:
        """The engine hangs: fail its requests now, ignore its events, and end it as far as its link can."""
        if self.gone:
            return
        self.cause = reason
        self._receive([Failed(request_id, reason, gone=True) for request_id in list(self._inboxes)])
        self._disowned = True
        self._stopped.set()
        self.link.disown(reason)

    def _sink(self) -> Callable[[Sequence[Event]], None]:
        def deliver(events: Sequence[Event]) -> None:
            self._steps.append(events)  # before the check: who sees it scheduled is taken along
            if self._scheduled:
                return
            if self._is_running():
                self._receive_steps()  # not soon: what is ready to run would come before it
                return
            self._scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._receive_steps)
            except RuntimeError:
                # The loop is closed: the server has stopped without waiting for a hung engine.
                log.warning("dropped %d engine events that came after the server had stopped", len(events))

        return deliver

    def _is_running(self) -> bool:
        """True if the event loop calls, not another thread."""
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    def _receive_steps(self) -> None:
        """All steps that have come: if the loop falls behind, a request gets its events of several steps together."""
        self._scheduled = False
        began = time.perf_counter()
        events: list[Event] = []
        while self._steps:
            events += self._steps.popleft()
        self._receive(events)
        self._turnstile.delivered(time.perf_counter() - began)

    def _receive(self, events: Sequence[Event]) -> None:
        if self._disowned:
            return
        was_busy = self.busy
        inboxes = self._inboxes
        added: list[Inbox] = []
        for event in _by_request(events):
            match event:
                case Outputs():
                    for request_id, value in zip(event.request_ids, event.values, strict=True):
                        inbox = inboxes[request_id]
                        if not inbox.give(request_id, value) and inbox.add(event.output(request_id, (value,))):
                            added.append(inbox)
                case Output():
                    inbox = inboxes[event.request_id]
                    if inbox.add(event):
                        added.append(inbox)
                case Finished() | Failed():
                    self.answered = self.answered or isinstance(event, Finished)
                    self.admission.release(event.request_id)
                    inbox = inboxes.pop(event.request_id)
                    if inbox.add(event):
                        added.append(inbox)
                case Started():
                    inboxes[event.request_id].on_started(event)
                case _:
                    self._handle(event)
        for inbox in added:
            inbox.flush()
        if was_busy and not self.busy:
            self._idle.set()
            self._on_idle()

    def _handle(self, event: Event) -> None:
        """An event of the engine itself, not of a request."""
        match event:
            case Loading():
                self._on_progress(LoadProgress(event.phase, event.share))
            case Loaded():
                self._loaded.set_result(event.facts)
            case LoadFailed():
                died = EngineDied if event.died else ModelError
                self._fail_load(event.message, DeviceLost if event.device_lost else died)
            case Measured():
                self.memory_bytes = event.memory_bytes
                self.cache_bytes, self.disk_bytes = event.cache_bytes, event.disk_bytes
                self.kv_tokens, self.speculated = event.kv_tokens, event.speculated
            case Stopped():
                self.cause = event.cause
                self._fail_load(event.cause or "the engine stopped")
                self._stopped.set()

    def _fail_load(self, reason: str, kind: type[ModelError] = ModelError) -> None:
        """Does nothing once the load has ended."""
        if not self._loaded.done():
            self._loaded.set_exception(kind(reason))

    def _post_if_open(self, command: Command) -> None:
        try:
            self.link.post_soon(command)
        except EngineGone:
            log.debug("the engine is gone, so %s is not posted", command)

    def _abandon(self, submits: Sequence[Submit], posted: int) -> None:
        """The engine closed while `submits` were being posted. It fails those that were; the others are dropped
        here."""
        for submit in submits[posted:]:
            self.admission.release(submit.request_id)
            self._inboxes.pop(submit.request_id, None)
        if not self._inboxes:
            self._idle.set()


def _by_request(events: Sequence[Event]) -> Sequence[Event]:
    """The same events, but if they have results of several steps in columns, those of a request as one event: a loop
    that has fallen behind catches up by writing less often."""
    columns = 0
    for event in events:
        columns += isinstance(event, Outputs)
    if columns < 2:
        return events
    joined: list[Event] = []
    values: dict[int, list[Any]] = {}
    last: Outputs | None = None
    for event in events:
        if isinstance(event, Outputs):
            last = event
            for request_id, value in zip(event.request_ids, event.values, strict=True):
                if request_id in values:
                    values[request_id].append(value)
                else:
                    values[request_id] = [value]
        else:
            if last is not None and isinstance(event, RequestEvent) and event.request_id in values:
                joined.append(last.output(event.request_id, values.pop(event.request_id)))
            joined.append(event)
    assert last is not None
    return [*joined, *(last.output(request_id, found) for request_id, found in values.items())]


def _retrieve_error(loaded: asyncio.Future[ModelFacts]) -> None:
    """A cancelled load is not awaited; without this, asyncio would log that its error was never retrieved."""
    if not loaded.cancelled():
        loaded.exception()
