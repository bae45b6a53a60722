"""A second kind of engine, as small as one can be: it hashes what it gets, one round per step. No tokens anywhere.

It stands on the same owner loop, links, hub and budget as generation, which proves that these know no kind.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from millstream.engine.background import BackgroundTask
from millstream.engine.messages import Command, Event, Failed, Finished, Output, Started, Submit
from millstream.engine.protocols import Progress, ignore_progress
from millstream.errors import BadRequest
from millstream.service.ready_model import ReadyModel

CAPACITY = 4
REFUSED = b"refuse"
"""Data that the background task refuses."""


@dataclass(frozen=True, slots=True)
class Digest(Submit):
    """Hash `data`, and its hash again, `rounds` times."""

    data: bytes
    rounds: int = 1


@dataclass(frozen=True, slots=True)
class SetSalt(Command):
    """A command of this kind's own: later requests begin with this salt."""

    salt: bytes


@dataclass(frozen=True, slots=True)
class Round(Output):
    """The hash after one more round."""

    digest: bytes


@dataclass(frozen=True, slots=True)
class Digested(Finished):
    digest: bytes


@dataclass(frozen=True, slots=True)
class DigestPlan:
    start: tuple[tuple[int, bytes], ...]
    run: tuple[int, ...]
    drop: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DigestFacts:
    capacity: int
    weight_bytes: int = 64
    device: str = "cpu (digest)"
    notes: tuple[str, ...] = ()
    summary: str = "SHA-256"


class DigestScheduler:
    commands = (Digest, SetSalt)

    def __init__(self, facts: DigestFacts) -> None:
        self._capacity = facts.capacity
        self._held: dict[int, Digest] = {}
        self._waiting: deque[Digest] = deque()
        self._running: dict[int, int] = {}
        """Rounds that are left."""
        self._drop: list[int] = []
        self._salt = b""
        self._started: tuple[tuple[int, bytes], ...] = ()

    @property
    def idle(self) -> bool:
        return not (self._waiting or self._running or self._drop)

    def submit(self, submit: Digest, *, held: bool = False) -> None:
        if held:
            self._held[submit.request_id] = submit
        else:
            self._waiting.append(submit)

    def release(self, request_id: int) -> None:
        if (submit := self._held.pop(request_id, None)) is not None:
            self._waiting.append(submit)

    def refuse(self, request_id: int, message: str, *, refused: bool = False) -> list[Event]:
        known = self._held.pop(request_id, None) is not None
        return [Failed(request_id, message, refused=refused)] if known else []

    def cancel(self, request_id: int) -> list[Event]:
        waiting = [submit for submit in self._waiting if submit.request_id != request_id]
        queued = len(waiting) < len(self._waiting) or self._held.pop(request_id, None) is not None
        self._waiting = deque(waiting)
        if self._running.pop(request_id, None) is not None:
            self._drop.append(request_id)
        elif not queued:
            return []
        return [Digested(request_id, b"")]

    def handle(self, command: Command) -> list[Event]:
        assert isinstance(command, SetSalt)
        self._salt = command.salt
        return []

    def wake_by(self, wake: Callable[[], None]) -> None:
        """Nothing wakes it but background tasks."""

    def collect(self) -> None:
        """Nothing comes from other threads."""

    def plan(self) -> DigestPlan:
        start = []
        while self._waiting and len(self._running) < self._capacity:
            submit = self._waiting.popleft()
            self._running[submit.request_id] = submit.rounds
            start.append((submit.request_id, self._salt + submit.data))
        drop, self._drop = tuple(self._drop), []
        self._started = tuple(start)
        return DigestPlan(tuple(start), tuple(self._running), drop)

    def started(self) -> list[Started]:
        return [Started(request_id) for request_id, _ in self._started]

    def advance(self, plan: DigestPlan, result: dict[int, bytes], seconds: float = 0.0) -> list[Event]:
        events: list[Event] = []
        for request_id, digest in result.items():
            self._running[request_id] -= 1
            events.append(Round(request_id, digest))
            if not self._running[request_id]:
                del self._running[request_id]
                self._drop.append(request_id)
                events.append(Digested(request_id, digest))
        return events

    def fail(self, message: str) -> list[Event]:
        failed = [Failed(request_id, message) for request_id in self._running]
        self._running.clear()
        self._drop.clear()
        return [*failed]

    def fail_all(self, message: str) -> list[Event]:
        left = [*self._held, *(submit.request_id for submit in self._waiting), *self._running]
        return [Failed(request_id, message, gone=True) for request_id in left]

    def cache_bytes(self) -> tuple[int, int]:
        return 0, 0

    def kv_tokens(self) -> None:
        """It has no KV cache."""

    def speculated(self) -> None:
        return None

    def close(self) -> None:
        """Nothing is on disk."""


class DigestBackend:
    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._states: dict[int, bytes] = {}

    def load(self, report: Progress = ignore_progress) -> DigestFacts:
        for done in (0.25, 0.5, 1.0):
            report(done)
        return DigestFacts(self._capacity)

    def background_task(self, request: Digest | None) -> BackgroundTask | None:
        """Large data, and what is refused, are looked at by another thread first."""
        if request is None or len(request.data) < len(REFUSED):
            return None
        return BackgroundTask(lambda: _check(request.data), len(request.data))

    def memory_bytes(self) -> int:
        return 64 + sum(map(len, self._states.values()))

    def step(self, plan: DigestPlan) -> dict[int, bytes]:
        for request_id in plan.drop:
            self._states.pop(request_id, None)
        self._states |= dict(plan.start)
        for request_id in plan.run:
            self._states[request_id] = hashlib.sha256(self._states[request_id]).digest()
        return {request_id: self._states[request_id] for request_id in plan.run}

    def reset(self) -> None:
        self._states.clear()

    def close(self) -> None:
        self._states.clear()


def _check(data: bytes) -> None:
    if data.startswith(REFUSED):
        raise BadRequest("this data is not hashed here")


@dataclass(frozen=True, slots=True)
class DigestModel(ReadyModel):
    kind: ClassVar[str] = "digests"


def expected(data: bytes, rounds: int = 1) -> bytes:
    for _ in range(rounds):
        data = hashlib.sha256(data).digest()
    return data
