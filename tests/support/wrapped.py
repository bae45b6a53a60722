"""Any backend, watched or held: the same tests run over the fake and the real one."""

from __future__ import annotations

from typing import Protocol

from millstream.engine.background import BackgroundTask
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import GenerationBackend, Plan, StepResult
from millstream.engine.protocols import BackendFactory, Progress, ignore_progress
from millstream.model_facts import GenerationFacts


class GateLike(Protocol):
    def pass_through(self) -> None: ...


class Wrapped:
    """Passes everything on, after `note` has been told what is asked."""

    def __init__(self, inner: GenerationBackend) -> None:
        self._inner = inner

    def note(self, what: str) -> None:
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
    """Held at a gate before each step; a step fails when told to."""

    def __init__(self, inner: GenerationBackend, gate: GateLike) -> None:
        super().__init__(inner)
        self._gate = gate
        self.fail_next: Exception | None = None

    def step(self, plan: Plan) -> StepResult:
        works = (plan.prefill or plan.decode) if isinstance(plan, Plan) else plan.run
        if works:  # a step that only drops rows is not held
            self._gate.pass_through()
            if self.fail_next is not None:
                error, self.fail_next = self.fail_next, None
                raise error
        return super().step(plan)


def gated(make: BackendFactory, gate: GateLike) -> Gated:
    """A factory that crosses to a child, if its parts do."""
    return Gated(make(), gate)
