"""The owner loop: the one thread that loads, runs and frees a model, of whatever kind."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from millstream.engine.background import BackgroundThread
from millstream.engine.heartbeat import BEAT_EVERY, Heartbeat
from millstream.engine.mailbox import Mailbox
from millstream.engine.messages import (
    Cancel,
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
from millstream.engine.protocols import Backend, BackendFactory, Scheduler, SchedulerFactory
from millstream.errors import BadRequest, DeviceLost, EngineGone, MillstreamError
from millstream.model_facts import LoadPhase

log = logging.getLogger(__name__)

Sink = Callable[[Sequence[Event]], None]
"""Takes one batch of events on the owner thread; must not block."""

AnyBackend = Backend[Any, Any, Any, Any]
AnyScheduler = Scheduler[Any, Any, Any]
"""A plan and a result pass from one to the other; the loop does not look inside."""

MAX_REASON = 300
"""Characters of another library's error: some quote whole commands."""
MEASURE_EVERY = 1.0
"""Seconds between two measurements of a busy engine's memory."""


class OwnerLoop:
    """Takes commands, plans, steps and emits events, until it is shut down. `run` is the whole life of an engine."""

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
        self._background = BackgroundThread(self._wake)

    def run(self) -> bool:
        """Returns True after a clean end: the thread can then serve another engine."""
        backend: AnyBackend | None = None
        scheduler: AnyScheduler | None = None
        try:
            backend = self._make_backend()
            scheduler = self._load(backend)
        except BaseException as error:  # any library may raise here; a native panic is not an Exception
            if not isinstance(error, MillstreamError):
                log.exception("loading failed")
            self._emit(self._load_failed(describe(error), isinstance(error, DeviceLost)))
        if backend is not None and scheduler is not None:
            self._serve(backend, scheduler)
        freed = backend is None or self._close(backend)
        self._background.close()
        self._emit([Stopped(self._crash)])
        return freed and self._crash is None

    def _load(self, backend: AnyBackend) -> AnyScheduler:
        self._report_load(0.0)  # importing MLX took seconds: the load may have been given up meanwhile
        if (task := backend.background_task(None)) is not None:
            self._background.run_soon(None, task)
        facts = backend.load(self._report_load)
        scheduler = self._make_scheduler(facts)
        scheduler.wake_by(self._wake)
        self._heartbeat.beat()
        self._emit([Loaded(facts), *self._measure(backend, scheduler)])
        return scheduler

    def _report_load(self, share: float, phase: LoadPhase = "reading weights") -> None:
        """Between two pieces of work of a load. Raises if the engine is asked to stop, which ends the load here."""
        if (reason := self._mailbox.shutdown_reason()) is not None:
            raise EngineGone(reason)
        self._emit([Loading(share, phase)])

    def _load_failed(self, reason: str, device_lost: bool = False) -> list[Event]:
        return [LoadFailed(reason, device_lost), *self._close_mailbox(f"the model could not be loaded: {reason}")]

    def _serve(self, backend: AnyBackend, scheduler: AnyScheduler) -> None:
        try:
            while self._ending is None:
                commands = self._mailbox.take(timeout=BEAT_EVERY if scheduler.idle else 0.0)
                self._heartbeat.beat()
                self._emit(self._handle(backend, scheduler, commands))
                if self._ending is None and not scheduler.idle:
                    events = self._step(backend, scheduler)
                    if scheduler.idle or time.monotonic() > self._measured[1] + MEASURE_EVERY:
                        events += self._measure(backend, scheduler)
                    self._emit(events)
        except BaseException as error:  # the owner ends here, and every request must get its end
            self._ending = self._crash = f"the engine stopped: {describe(error)}"
            log.exception("the engine stopped")
        finally:
            reason = self._ending or "the engine stopped"
            self._emit([*scheduler.fail_all(reason), *self._close_mailbox(reason)])
            scheduler.close()

    def _wake(self) -> None:
        """Callable on any thread."""
        try:
            self._mailbox.post_soon(Wake())
        except EngineGone:
            log.debug("the engine is stopping: a background result is dropped")

    def _handle(self, backend: AnyBackend, scheduler: AnyScheduler, commands: Sequence[Command]) -> list[Event]:
        """Handle all commands before the next plan, so that a cancel takes effect before the next step."""
        events: list[Event] = []
        for command in commands:
            match command:
                case _ if not isinstance(command, (Cancel, Wake, Shutdown, *scheduler.commands)):
                    events.extend(_unknown(command))
                case Submit():
                    self._submit(backend, scheduler, command)
                case Cancel():
                    self._background.cancel(command.request_id)
                    events.extend(scheduler.cancel(command.request_id))
                case Wake():
                    scheduler.collect()
                    events.extend(self._collect_background(scheduler))
                case Shutdown():
                    self._ending = self._ending or command.reason
                case _:
                    events.extend(scheduler.handle(command))
        return events

    def _submit(self, backend: AnyBackend, scheduler: AnyScheduler, submit: Submit) -> None:
        task = backend.background_task(submit)
        scheduler.submit(submit, held=task is not None)
        if task is not None:
            self._background.run_soon(submit.request_id, task)

    def _collect_background(self, scheduler: AnyScheduler) -> list[Event]:
        """Release or refuse requests whose background task is done. A failure of the task at load is ignored here: the
        first request that needs it fails with the same error."""
        events: list[Event] = []
        for done in self._background.done():
            if done.request_id is None:
                continue
            if done.error is None:
                scheduler.release(done.request_id)
            else:
                events.extend(scheduler.refuse(done.request_id, done.error, refused=done.refused))
        return events

    def _step(self, backend: AnyBackend, scheduler: AnyScheduler) -> list[Event]:
        plan = scheduler.plan()
        self._emit(list(scheduler.started()))  # now: the step may take seconds
        started = time.monotonic()
        self._heartbeat.begin_step()
        try:
            result = backend.step(plan)
        except BadRequest as error:  # the client's input is at fault, and it learns of what
            failed = list(scheduler.fail(error.message))
            backend.reset()
            return [replace(each, refused=True) if isinstance(each, Failed) else each for each in failed]
        except Exception as error:
            log.exception("a step failed: %s", plan)
            events = list(scheduler.fail(f"the model failed in this step: {describe(error)}"))
            backend.reset()
            return events
        finally:
            self._heartbeat.end_step()
        return list(scheduler.advance(plan, result, time.monotonic() - started))

    def _measure(self, backend: AnyBackend, scheduler: AnyScheduler) -> list[Event]:
        """A `Measured` event if a figure has changed."""
        before = self._measured[0]
        now = Measured(backend.memory_bytes(), *scheduler.cache_bytes(), scheduler.kv_tokens(), scheduler.speculated())
        self._measured = (now, time.monotonic())
        return [now] if now != before else []

    def _close_mailbox(self, reason: str) -> list[Event]:
        """Fail requests that were accepted by the mailbox but never reached the scheduler."""
        left = self._mailbox.close(reason)
        return [Failed(command.request_id, reason, gone=True) for command in left if isinstance(command, Submit)]

    def _close(self, backend: AnyBackend) -> bool:
        try:
            backend.close()
        except Exception:
            log.exception("freeing the model failed")
            return False
        return True

    def _emit(self, events: Sequence[Event]) -> None:
        if events:
            self._sink(events)


def _unknown(command: Command) -> list[Event]:
    """A command of another kind of engine must not end this one with all its requests."""
    reason = f"this kind of engine does not know the command {type(command).__name__}"
    log.error("ignored: %s", reason)
    return [Failed(command.request_id, reason)] if isinstance(command, Submit) else []


def describe(error: BaseException) -> str:
    """An error in one line: our own by their message, others with their type. The log has the rest."""
    if isinstance(error, MillstreamError):
        return error.message
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first[:MAX_REASON]}"
