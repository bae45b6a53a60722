"""Wrappers that observe or hold any backend, so that tests run on the fake and the real one alike."""

from __future__ import annotations

from typing import Any, Protocol

from millstream.engine.background import BackgroundTask
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import GenerationBackend, Plan, StepResult
from millstream.engine.jobs.plan import BatchPlan
from millstream.engine.protocols import BackendFactory, Progress, ignore_progress
from millstream.engine.speech.plan import SpeechPlan
from millstream.engine.transcription.plan import TranscriptionPlan
from millstream.model_facts import GenerationFacts


class GateLike(Protocol):
    def pass_through(self) -> None: ...


class Wrapped:
    """Forwards every call, after `note` with the name of the method."""

    def __init__(self, inner: GenerationBackend) -> None:
        self._inner = inner

    def note(self, method: str) -> None:
        """For subclasses."""

    def load(self, report: Progress = ignore_progress) -> GenerationFacts:
        self.note("load")
        return self._inner.load(report)

    def step(self, plan: Plan) -> StepResult:
        self.note("step")
        return self._inner.step(plan)

    def background_task(self, request: Generate | None) -> BackgroundTask | None:
        self.note("background_task")
        return self._inner.background_task(request)

    def memory_bytes(self) -> int:
        self.note("memory_bytes")
        return self._inner.memory_bytes()

    def reset(self) -> None:
        self.note("reset")
        self._inner.reset()

    def close(self) -> None:
        self.note("close")
        self._inner.close()


class Gated(Wrapped):
    """Waits at a gate before each step. The next step raises `fail_next`, if set."""

    def __init__(self, inner: GenerationBackend, gate: GateLike) -> None:
        super().__init__(inner)
        self._gate = gate
        self.fail_next: Exception | None = None

    def step(self, plan: Plan) -> StepResult:
        if _has_work(plan):  # a step that only drops rows is not held
            self._gate.pass_through()
            if self.fail_next is not None:
                error, self.fail_next = self.fail_next, None
                raise error
        return super().step(plan)


def _has_work(plan: Any) -> bool:
    if isinstance(plan, BatchPlan | TranscriptionPlan):
        return True
    if isinstance(plan, SpeechPlan):
        return bool(plan.begin)  # nor one that only finds the end of a batch
    return bool(plan.prefill or plan.decode) if isinstance(plan, Plan) else bool(plan.run)


def gated(make: BackendFactory, gate: GateLike) -> Gated:
    """A factory for `functools.partial`, which can be pickled for a child process."""
    return Gated(make(), gate)
