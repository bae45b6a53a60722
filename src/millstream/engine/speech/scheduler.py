"""Decides which pieces a speech engine speaks next. Pure: no thread, clock or MLX."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from millstream.engine.messages import Command, Event, Failed, Started
from millstream.engine.speech.messages import TOKEN_BYTES, Piece, Speak, SpeakMore, SpeechEnded, Spoken
from millstream.engine.speech.plan import PieceInput, SpeechPlan, SpeechResult
from millstream.model_facts import SpeechFacts

LIKE_LENGTH = 0.7
"""A piece joins a batch if it has at least this share of the tokens of the longest: padding costs as much as sound."""


@dataclass(slots=True)
class _Request:
    submit: Speak
    pending: deque[Piece]
    more: bool
    """True if pieces will follow."""
    begun: int = 0
    """Pieces that have begun. They run one after the other, so that their order is kept."""
    running: bool = False

    @property
    def ready(self) -> bool:
        return not self.running and bool(self.pending)

    @property
    def complete(self) -> bool:
        return not (self.running or self.pending or self.more)

    @property
    def size(self) -> int:
        piece = self.pending[0]
        return max(len(piece.tokens) // TOKEN_BYTES, len(piece.text), 1)


class SpeechScheduler:
    """Requests take turns piece by piece: the one whose last piece began longest ago is next. So a short text does not
    wait for a long one, and nobody waits for ever. Batches that need several steps take turns as well.
    """

    commands = (Speak, SpeakMore)

    def __init__(self, facts: SpeechFacts) -> None:
        self._batch_pieces = facts.batch_pieces
        self._open_batches = facts.open_batches
        self._held: dict[int, Speak] = {}
        self._requests: dict[int, _Request] = {}
        """In the order of their turns."""
        self._open: dict[int, tuple[PieceInput, ...]] = {}
        """The batches that have begun, in the order of their turns."""
        self._dropped: list[int] = []
        self._batches = 0
        self._unstarted: set[int] = set()
        self._begun: frozenset[int] = frozenset()
        """The requests of the batch that the last plan began."""

    @property
    def idle(self) -> bool:
        return not self._open and not self._dropped and not any(each.ready for each in self._requests.values())

    def submit(self, submit: Speak, *, held: bool = False) -> None:
        if held:
            self._held[submit.request_id] = submit
        else:
            self._requests[submit.request_id] = _Request(submit, deque(submit.pieces), submit.more)
            self._unstarted.add(submit.request_id)

    def release(self, request_id: int) -> None:
        if (submit := self._held.pop(request_id, None)) is not None:
            self.submit(submit)

    def refuse(self, request_id: int, message: str, *, refused: bool = False) -> Iterable[Event]:
        known = self._held.pop(request_id, None) is not None
        return [Failed(request_id, message, refused=refused)] if known else []

    def cancel(self, request_id: int) -> Iterable[Event]:
        known = (self._requests.pop(request_id, None) or self._held.pop(request_id, None)) is not None
        self._unstarted.discard(request_id)
        self._drop_unwanted()
        return [SpeechEnded(request_id)] if known else []

    def handle(self, command: Command) -> Iterable[Event]:
        assert isinstance(command, SpeakMore)
        request = self._requests.get(command.request_id)
        if request is None:
            return []
        request.pending.extend(command.pieces)
        request.more = command.more
        return self._end_if_complete(request)

    def wake_by(self, wake: Callable[[], None]) -> None:
        """Nothing wakes it but background tasks."""

    def collect(self) -> None:
        """Nothing comes from other threads."""

    def plan(self) -> SpeechPlan:
        dropped, self._dropped = tuple(self._dropped), []
        self._begun = frozenset()
        if len(self._open) < self._open_batches and (taken := self._take()):
            self._batches += 1
            self._open[self._batches] = taken
            self._begun = frozenset(each.request_id for each in taken)
            return SpeechPlan(self._batches, taken, dropped)
        if not self._open:
            return SpeechPlan(0, (), dropped)
        number = next(iter(self._open))
        self._open[number] = self._open.pop(number)  # the last in turn now
        return SpeechPlan(number, (), dropped)

    def started(self) -> Iterable[Started]:
        first = self._begun & self._unstarted
        self._unstarted -= first
        return [Started(request_id) for request_id in first]

    def advance(self, plan: SpeechPlan, result: SpeechResult, seconds: float = 0.0) -> Iterable[Event]:
        events: list[Event] = []
        batch = self._open.pop(plan.batch, ()) if result.done else self._open.get(plan.batch, ())
        for each, samples in zip(batch, result.samples, strict=True):
            request = self._requests.get(each.request_id)
            if request is None:
                continue
            if samples or result.done:
                events.append(Spoken(each.request_id, each.index, samples, result.done))
            if result.done:
                request.running = False
                events.extend(self._end_if_complete(request))
        return events

    def fail(self, message: str) -> Iterable[Event]:
        """The backend drops all batches when it is reset, so every request in one fails."""
        in_batches = {each.request_id for batch in self._open.values() for each in batch}
        self._open.clear()
        self._dropped.clear()
        failed = [request_id for request_id in in_batches if self._requests.pop(request_id, None) is not None]
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

    def _take(self) -> tuple[PieceInput, ...]:
        """The next piece in turn, and pieces of like length of other requests."""
        ready = [request for request in self._requests.values() if request.ready]
        if not ready:
            return ()
        first = ready[0]
        taken = [first]
        shortest = longest = first.size
        for request in ready[1:]:
            if len(taken) == self._batch_pieces:
                break
            low, high = min(shortest, request.size), max(longest, request.size)
            if low >= LIKE_LENGTH * high:
                taken.append(request)
                shortest, longest = low, high
        return tuple(self._begin(request) for request in taken)

    def _begin(self, request: _Request) -> PieceInput:
        submit, index = request.submit, request.begun
        piece = request.pending.popleft()
        request.begun += 1
        request.running = True
        self._requests[submit.request_id] = self._requests.pop(submit.request_id)  # the last in turn now
        return PieceInput(
            submit.request_id,
            index,
            piece,
            submit.voice,
            submit.speed,
            submit.language,
            submit.instructions,
        )

    def _end_if_complete(self, request: _Request) -> list[Event]:
        if not request.complete:
            return []
        del self._requests[request.submit.request_id]
        self._unstarted.discard(request.submit.request_id)
        return [SpeechEnded(request.submit.request_id)]

    def _drop_unwanted(self) -> None:
        for number, batch in list(self._open.items()):
            if not any(each.request_id in self._requests for each in batch):
                del self._open[number]
                self._dropped.append(number)
