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
    Forget,
    Loaded,
    LoadFailed,
    Loading,
    Measured,
    PromptRead,
    Shutdown,
    Stopped,
    Submit,
    Tokens,
)
from millstream.errors import EngineGone, ModelError
from millstream.service.admission import Admission
from millstream.service.inbox import Inbox
from millstream.types import ModelFacts

log = logging.getLogger(__name__)


class EngineClient:
    """All methods run on the event loop, and none of them waits for a step."""

    def __init__(
        self,
        link: Link,
        admission: Admission,
        *,
        on_progress: Callable[[float], None] = lambda done: None,
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_progress` is told how far a load is, `on_idle` whenever the last request has left."""
        self.link = link
        self.admission = admission
        self.memory_bytes = self.kept_bytes = self.disk_bytes = 0
        self.answered = False
        """Whether it has ended a request well."""
        self.cause: str | None = None
        """Why it is gone, if nobody asked for it."""
        self._on_progress = on_progress
        self._on_idle = on_idle
        self._inboxes: dict[int, Inbox] = {}
        self._loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[ModelFacts] = self._loop.create_future()
        self._stopped = asyncio.Event()
        self._disowned = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def busy(self) -> bool:
        return bool(self._inboxes)

    @property
    def gone(self) -> bool:
        """The engine has ended, by order or by a crash."""
        return self._stopped.is_set()

    async def wait_gone(self) -> str | None:
        """Returns when the engine has ended: None if by order, else why."""
        await self._stopped.wait()
        return self.cause

    async def load(self) -> ModelFacts:
        """Start the engine and wait for its model. Raises `ModelError`."""
        self.link.start_soon(self._sink())
        facts = await asyncio.shield(self._loaded)
        self.admission.set_rows(facts.max_rows)
        return facts

    def submit(self, submits: Sequence[Submit], inbox: Inbox) -> None:
        """Admit and post all, or raise and post none."""
        self.admission.admit([submit.request_id for submit in submits])
        for number, submit in enumerate(submits):
            self._inboxes[submit.request_id] = inbox
            self._idle.clear()
            try:
                self.link.post_soon(submit)
            except EngineGone:
                self._abandon(submits, number)
                raise

    def replace(self, request_id: int, submit: Submit, inbox: Inbox) -> None:
        """Cancel a request and post one that goes on in its place, which needs no admission."""
        self.cancel([request_id])
        self.admission.carry_on(submit.request_id)
        self._inboxes[submit.request_id] = inbox
        self._idle.clear()
        try:
            self.link.post_soon(submit)
        except EngineGone:
            self._abandon([submit], 0)
            raise

    def cancel(self, request_ids: Sequence[int]) -> None:
        """Ask for these to be dropped before the next step; an engine that is gone has dropped them already."""
        for request_id in request_ids:
            if request_id in self._inboxes:
                self._post_if_open(Cancel(request_id))

    def forget(self) -> None:
        """Free the beginnings of prompts that are kept; one that is gone keeps none."""
        self._post_if_open(Forget())

    async def drained(self) -> None:
        """Returns when no request is left."""
        await self._idle.wait()

    async def stop(self, reason: str, patience: float) -> bool:
        """End the engine; true if it freed its model within `patience` seconds, false if it hangs in a step."""
        if self._disowned:
            return False
        self._post_if_open(Shutdown(reason))
        try:
            await asyncio.wait_for(self._stopped.wait(), patience)
        except TimeoutError:
            return False
        return await asyncio.to_thread(self.link.join, patience)

    def disown(self, reason: str) -> None:
        """The engine hangs: fail its requests now, listen to it no more, and end it as far as its link can."""
        if self.gone:
            return
        self.cause = reason
        self._receive([Failed(request_id, reason, gone=True) for request_id in list(self._inboxes)])
        self._disowned = True
        self._stopped.set()
        self.link.disown(reason)

    def _sink(self) -> Callable[[Sequence[Event]], None]:
        def deliver(events: Sequence[Event]) -> None:
            try:
                self._loop.call_soon_threadsafe(self._receive, events)
            except RuntimeError:
                # The loop is closed: the server has gone without waiting for a hung engine. Nobody is left to tell.
                log.warning("%d events came after the end of the server", len(events))

        return deliver

    def _receive(self, events: Sequence[Event]) -> None:
        if self._disowned:
            return
        was_busy = self.busy
        for event in events:
            match event:
                case Tokens() | PromptRead():
                    self._inboxes[event.request_id].push(event)
                case Finished() | Failed():
                    self.answered = self.answered or isinstance(event, Finished)
                    self.admission.release(event.request_id)
                    self._inboxes.pop(event.request_id).push(event)
                case _:
                    self._note(event)
        if was_busy and not self.busy:
            self._idle.set()
            self._on_idle()

    def _note(self, event: Event) -> None:
        """News of the engine itself."""
        match event:
            case Loading():
                self._on_progress(event.progress)
            case Loaded():
                self._loaded.set_result(event.facts)
            case LoadFailed():
                self._loaded.set_exception(ModelError(event.message))
            case Measured():
                self.memory_bytes = event.memory_bytes
                self.kept_bytes, self.disk_bytes = event.kept_bytes, event.disk_bytes
            case Stopped():
                self.cause = event.cause
                self._stopped.set()

    def _post_if_open(self, command: Cancel | Forget | Shutdown) -> None:
        try:
            self.link.post_soon(command)
        except EngineGone:
            log.debug("the engine is gone; %s is not needed", command)

    def _abandon(self, submits: Sequence[Submit], posted: int) -> None:
        """The engine closed while `submits` were being posted: those already posted will be failed by it."""
        for submit in submits[posted:]:
            self.admission.release(submit.request_id)
            self._inboxes.pop(submit.request_id, None)
        if not self._inboxes:
            self._idle.set()
