"""Decides which inputs the next batch of an encoder engine has. Pure: no thread, clock or MLX."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from millstream.engine.jobs.messages import Encode, Encoded, Vectors
from millstream.engine.jobs.packing import Job, Limits, pack
from millstream.engine.jobs.plan import BatchInput, BatchPlan, BatchResult
from millstream.engine.messages import Command, Event, Failed, Started
from millstream.model_facts import EncoderFacts

FLOAT_BYTES = 4


class JobScheduler:
    """Every other batch begins with the oldest request, so that each one ends, however many come after it. The batches
    in between begin with the request that has least left: a short one waits for two batches, not for a thousand inputs
    that came before it. What room is left in a batch goes to inputs of like length, oldest request first.
    """

    commands = (Encode,)

    def __init__(self, facts: EncoderFacts) -> None:
        self._limits = Limits(facts.batch_tokens, facts.free_tokens)
        self._held: dict[int, Encode] = {}
        self._jobs: dict[int, Job] = {}
        """In order of arrival."""
        self._running: frozenset[int] = frozenset()
        """The requests of the last plan."""
        self._oldest_turn = True
        self._unstarted: set[int] = set()
        """Requests of which no input has run."""

    @property
    def idle(self) -> bool:
        return not self._jobs

    def submit(self, submit: Encode, *, held: bool = False) -> None:
        if held:
            self._held[submit.request_id] = submit
        else:
            self._jobs[submit.request_id] = Job(submit)
            self._unstarted.add(submit.request_id)

    def release(self, request_id: int) -> None:
        if (submit := self._held.pop(request_id, None)) is not None:
            self.submit(submit)

    def refuse(self, request_id: int, message: str, *, refused: bool = False) -> Iterable[Event]:
        known = self._held.pop(request_id, None) is not None
        return [Failed(request_id, message, refused=refused)] if known else []

    def cancel(self, request_id: int) -> Iterable[Event]:
        known = (self._jobs.pop(request_id, None) or self._held.pop(request_id, None)) is not None
        self._unstarted.discard(request_id)
        return [Encoded(request_id)] if known else []

    def handle(self, command: Command) -> Iterable[Event]:
        """There are no such commands."""
        return []

    def wake_by(self, wake: Callable[[], None]) -> None:
        """Nothing wakes it but background tasks."""

    def collect(self) -> None:
        """Nothing comes from other threads."""

    def plan(self) -> BatchPlan:
        jobs = list(self._jobs.values())
        anchor, *others = jobs
        if others and not self._oldest_turn:
            anchor = min(others, key=lambda job: job.tokens)
        self._oldest_turn = not self._oldest_turn
        taken = pack(anchor, (job for job in jobs if job is not anchor), self._limits)
        self._running = frozenset(job.submit.request_id for job, _, _ in taken)
        inputs = tuple(_input(job.submit, index) for job, _, index in taken)
        return BatchPlan(inputs, max(length for _, length, _ in taken))

    def started(self) -> Iterable[Started]:
        first = self._running & self._unstarted
        self._unstarted -= first
        return [Started(request_id) for request_id in first]

    def advance(self, plan: BatchPlan, result: BatchResult, seconds: float = 0.0) -> Iterable[Event]:
        size = FLOAT_BYTES * result.width
        rows: dict[int, list[tuple[int, bytes]]] = {}
        for place, each in enumerate(plan.inputs):
            vector = result.values[place * size : (place + 1) * size]
            rows.setdefault(each.request_id, []).append((each.index, vector))
        events: list[Event] = []
        for request_id, vectors in rows.items():
            if (job := self._jobs.get(request_id)) is None:
                continue
            indexes, values = zip(*vectors, strict=True)
            events.append(Vectors(request_id, indexes, b"".join(values), result.width))
            if not job.pending:
                del self._jobs[request_id]
                events.append(Encoded(request_id))
        return events

    def fail(self, message: str) -> Iterable[Event]:
        failed = [request_id for request_id in self._running if self._jobs.pop(request_id, None) is not None]
        return [Failed(request_id, message) for request_id in failed]

    def fail_all(self, message: str) -> Iterable[Event]:
        return [Failed(request_id, message, gone=True) for request_id in (*self._held, *self._jobs)]

    def cache_bytes(self) -> tuple[int, int]:
        return 0, 0

    def kv_tokens(self) -> int | None:
        return None

    def speculated(self) -> None:
        return None

    def close(self) -> None:
        """Nothing is on disk."""


def _input(submit: Encode, index: int) -> BatchInput:
    first_part = submit.first_parts[index] if submit.first_parts else None
    return BatchInput(submit.request_id, index, submit.inputs[index], first_part)
