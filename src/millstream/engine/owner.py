"""The owner loop: the one thread that loads, runs and frees a model."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from millstream.engine.background import BackgroundThread
from millstream.engine.generation.backend import BackendFactory, GenerationBackend, Plan
from millstream.engine.generation.scheduler import Scheduler
from millstream.engine.heartbeat import BEAT_EVERY, Heartbeat
from millstream.engine.mailbox import Mailbox
from millstream.engine.messages import (
    Cancel,
    ClearPrefixCache,
    Command,
    Event,
    Failed,
    Loaded,
    LoadFailed,
    Loading,
    Measured,
    Shutdown,
    Stopped,
    Submit,
    Wake,
)
from millstream.errors import EngineGone, MillstreamError
from millstream.types import ModelFacts

log = logging.getLogger(__name__)

Sink = Callable[[Sequence[Event]], None]
"""Takes one batch of events on the owner thread; must not block."""

SchedulerFactory = Callable[[ModelFacts], Scheduler]


MEASURE_EVERY = 1.0
"""Seconds between two looks at the memory of a busy engine."""


class OwnerLoop:
    """Wait for mail when idle, drain it, plan, step, emit. `run` is the whole life of an engine."""

    def __init__(
        self, mailbox: Mailbox, backend: BackendFactory, scheduler: SchedulerFactory, sink: Sink, heartbeat: Heartbeat
    ) -> None:
        self._mailbox = mailbox
        self._heartbeat = heartbeat
        self._make_backend: Final = backend
        self._make_scheduler: Final = scheduler
        self._sink = sink
        self._ending: str | None = None
        self._crash: str | None = None
        self._measured = (Measured(0), 0.0)
        self._errands = BackgroundThread(self._wake)

    def run(self) -> bool:
        """True if all ended as it should, so that the thread can serve another engine."""
        backend: GenerationBackend | None = None
        scheduler: Scheduler | None = None
        try:
            backend = self._make_backend()
            scheduler = self._load(backend)
        except BaseException as error:  # whatever a library raises; a panic of native code is no Exception
            if not isinstance(error, MillstreamError):
                log.exception("loading failed")
            self._emit(self._load_failed(describe(error)))
        if backend is not None and scheduler is not None:
            self._serve(backend, scheduler)
        freed = backend is None or self._close(backend)
        self._errands.close()
        self._emit([Stopped(self._crash)])
        return freed and self._crash is None

    def _load(self, backend: GenerationBackend) -> Scheduler:
        if (errand := backend.errand(None)) is not None:
            self._errands.run_soon(None, errand)
        facts = backend.load(lambda done: self._emit([Loading(done)]))
        scheduler = self._make_scheduler(facts)
        scheduler.wake_by(self._wake)
        self._heartbeat.beat()
        self._emit([Loaded(facts), *self._measure(backend, scheduler)])
        return scheduler

    def _load_failed(self, why: str) -> list[Event]:
        return [LoadFailed(why), *self._refuse(f"the model could not be loaded: {why}")]

    def _serve(self, backend: GenerationBackend, scheduler: Scheduler) -> None:
        try:
            while self._ending is None:
                mail = self._mailbox.take(wait=BEAT_EVERY if scheduler.idle else 0.0)
                self._heartbeat.beat()
                self._emit(self._obey(backend, scheduler, mail))
                if self._ending is None and not scheduler.idle:
                    events = self._step(backend, scheduler, scheduler.plan())
                    if scheduler.idle or time.monotonic() > self._measured[1] + MEASURE_EVERY:
                        events += self._measure(backend, scheduler)
                    self._emit(events)
        except BaseException as error:  # the owner ends here whatever it was, and everyone inside must be told
            self._ending = self._crash = f"the engine stopped: {describe(error)}"
            log.exception("the engine stopped")
        finally:
            reason = self._ending or "the engine stopped"
            self._emit([*scheduler.fail_all(reason), *self._refuse(reason)])
            scheduler.close()

    def _wake(self) -> None:
        """Any thread."""
        try:
            self._mailbox.post_soon(Wake())
        except EngineGone:
            log.debug("the engine is going; nobody waits for what has come")

    def _obey(self, backend: GenerationBackend, scheduler: Scheduler, commands: Sequence[Command]) -> list[Event]:
        """All mail is booked before the next plan, so a cancel takes effect before the next step."""
        events: list[Event] = []
        for command in commands:
            match command:
                case Submit():
                    self._submit(backend, scheduler, command)
                case Cancel():
                    self._errands.cancel(command.request_id)
                    events.extend(scheduler.cancel(command.request_id))
                case ClearPrefixCache():
                    scheduler.forget()
                case Wake():
                    scheduler.collect()
                    events.extend(self._collect(scheduler))
                case Shutdown():
                    self._ending = self._ending or command.reason
        return events

    def _submit(self, backend: GenerationBackend, scheduler: Scheduler, submit: Submit) -> None:
        errand = backend.errand(submit)
        scheduler.submit(submit, held=errand is not None)
        if errand is not None:
            self._errands.run_soon(submit.request_id, errand, len(submit.grammar.source) if submit.grammar else 0)

    def _collect(self, scheduler: Scheduler) -> list[Event]:
        """Those whose errands are done may go on, or fail. A cancelled request's errand is done for nobody, and so is
        one that came at the load: its trouble comes back with the first request that needs it."""
        events: list[Event] = []
        for done in self._errands.done():
            if done.request_id is None:
                continue
            if done.error is None:
                scheduler.release(done.request_id)
            else:
                events.extend(scheduler.refuse(done.request_id, done.error, refused=done.refused))
        return events

    def _step(self, backend: GenerationBackend, scheduler: Scheduler, plan: Plan) -> list[Event]:
        started = time.monotonic()
        self._heartbeat.begin_step()
        try:
            result = backend.step(plan)
        except Exception as error:
            log.exception("a step failed: %d rows, %d prompts", len(plan.decode), len(plan.prefill))
            events = scheduler.fail(f"the model failed in this step: {describe(error)}")
            backend.reset()
            return events
        finally:
            self._heartbeat.end_step()
        return scheduler.advance(plan, result, time.monotonic() - started)

    def _measure(self, backend: GenerationBackend, scheduler: Scheduler) -> list[Event]:
        """News of the memory, if there are any."""
        before, now = self._measured[0], Measured(backend.memory_bytes(), *scheduler.cache_bytes())
        self._measured = (now, time.monotonic())
        return [now] if now != before else []

    def _refuse(self, reason: str) -> list[Event]:
        """Close the mailbox and fail what was accepted there but never reached the scheduler."""
        left = self._mailbox.close(reason)
        return [Failed(command.request_id, reason, gone=True) for command in left if isinstance(command, Submit)]

    def _close(self, backend: GenerationBackend) -> bool:
        try:
            backend.close()
        except Exception:
            log.exception("freeing the model failed")
            return False
        return True

    def _emit(self, events: Sequence[Event]) -> None:
        if events:
            self._sink(events)


def describe(error: BaseException) -> str:
    """An error as one line for a person: our own say what they mean, others need their type."""
    return error.message if isinstance(error, MillstreamError) else f"{type(error).__name__}: {error}"
