"""Decides which windows a transcription engine begins next. Pure: no thread, clock or MLX."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from millstream.engine.messages import Command, Event, Failed, Started
from millstream.engine.transcription.messages import AddWindows, Options, Transcribe, Transcribed, Window
from millstream.engine.transcription.plan import RowKey, TranscriptionPlan, TranscriptionResult, WindowStart
from millstream.model_facts import TranscriptionFacts


@dataclass(slots=True)
class _Request:
    options: Options
    pending: deque[Window]
    complete: bool
    waits_for_language: bool
    """Its language is not known: one window runs at a time, and the others follow it."""
    running: set[int] = field(default_factory=set)
    """Windows that are rows."""
    started: bool = False

    @property
    def may_start(self) -> bool:
        return bool(self.pending) and not (self.waits_for_language and self.running)

    @property
    def ended(self) -> bool:
        return self.complete and not self.pending and not self.running


class TranscriptionScheduler:
    """A free row goes to the request that has the fewest rows, and of these to the oldest: an hour of audio takes all
    rows while it is alone, and gives up half of them, one by one as windows end, when another request comes.
    """

    commands = (Transcribe, AddWindows)

    def __init__(self, facts: TranscriptionFacts) -> None:
        self._facts = facts
        self._held: dict[int, tuple[Transcribe, list[AddWindows]]] = {}
        self._requests: dict[int, _Request] = {}
        """In order of arrival."""
        self._drop: list[RowKey] = []
        """Rows of cancelled requests that the backend still has."""
        self._newly_started: list[int] = []

    @property
    def idle(self) -> bool:
        return not self._drop and not any(each.pending or each.running for each in self._requests.values())

    def submit(self, submit: Transcribe, *, held: bool = False) -> None:
        if held:
            self._held[submit.request_id] = (submit, [])
            return
        unknown = submit.options.language is None and self._facts.detects_language
        self._requests[submit.request_id] = _Request(
            submit.options, deque(submit.windows), submit.complete, waits_for_language=unknown
        )

    def release(self, request_id: int) -> None:
        if (held := self._held.pop(request_id, None)) is not None:
            submit, more = held
            self.submit(submit)
            for command in more:
                self._add(self._requests[request_id], command)

    def refuse(self, request_id: int, message: str, *, refused: bool = False) -> Iterable[Event]:
        known = self._held.pop(request_id, None) is not None
        return [Failed(request_id, message, refused=refused)] if known else []

    def cancel(self, request_id: int) -> Iterable[Event]:
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._drop += [(request_id, index) for index in request.running]
        elif self._held.pop(request_id, None) is None:
            return []
        return [Transcribed(request_id)]

    def handle(self, command: Command) -> Iterable[Event]:
        assert isinstance(command, AddWindows)
        if (held := self._held.get(command.request_id)) is not None:
            held[1].append(command)
        elif (request := self._requests.get(command.request_id)) is not None:
            self._add(request, command)
            return self._ends([command.request_id])
        return []

    def wake_by(self, wake: Callable[[], None]) -> None:
        """Nothing wakes it but background tasks."""

    def collect(self) -> None:
        """Nothing comes from other threads."""

    def plan(self) -> TranscriptionPlan:
        free = self._facts.max_rows - sum(len(request.running) for request in self._requests.values())
        start: list[WindowStart] = []
        for _ in range(min(free, self._facts.start_windows)):
            waiting = [(number, request) for number, request in self._requests.items() if request.may_start]
            if not waiting:
                break
            request_id, request = min(waiting, key=lambda each: len(each[1].running))
            window = request.pending.popleft()
            request.running.add(window.index)
            start.append(WindowStart(request_id, window.index, window.samples, request.options))
            if not request.started:
                request.started = True
                self._newly_started.append(request_id)
        drop, self._drop = self._drop, []
        return TranscriptionPlan(tuple(start), tuple(drop))

    def started(self) -> Iterable[Started]:
        started, self._newly_started = self._newly_started, []
        return [Started(request_id) for request_id in started]

    def advance(self, plan: TranscriptionPlan, result: TranscriptionResult, seconds: float = 0.0) -> Iterable[Event]:
        for request_id, language in result.languages:
            if (request := self._requests.get(request_id)) is not None and request.waits_for_language:
                request.options = replace(request.options, language=language)
                request.waits_for_language = False
        events: list[Event] = []
        for text in result.done:
            if (request := self._requests.get(text.request_id)) is not None:
                request.running.discard(text.index)
                events.append(text)
        return [*events, *self._ends(dict.fromkeys(text.request_id for text in result.done))]

    def fail(self, message: str) -> Iterable[Event]:
        failed = [request_id for request_id, request in self._requests.items() if request.running]
        for request_id in failed:
            del self._requests[request_id]
        self._drop.clear()  # the backend is reset
        return [Failed(request_id, message) for request_id in failed]

    def fail_all(self, message: str) -> Iterable[Event]:
        return [Failed(request_id, message, gone=True) for request_id in (*self._held, *self._requests)]

    def cache_bytes(self) -> tuple[int, int]:
        return 0, 0

    def kv_tokens(self) -> int | None:
        return None

    def speculated(self) -> None:
        return None

    def close(self) -> None:
        """Nothing is on disk."""

    def _add(self, request: _Request, command: AddWindows) -> None:
        request.pending.extend(command.windows)
        request.complete = request.complete or command.complete

    def _ends(self, request_ids: Iterable[int]) -> list[Event]:
        ended = [number for number in request_ids if (found := self._requests.get(number)) is None or found.ended]
        return [Transcribed(number) for number in ended if self._requests.pop(number, None) is not None]
