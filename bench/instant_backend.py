"""A generation backend that costs nothing, to measure what the rest of the server costs."""

from __future__ import annotations

import time
from dataclasses import dataclass

from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import GenerationBackend, Plan, RowOutput, StepResult
from millstream.engine.protocols import Progress, ignore_progress
from millstream.loading.settings import EngineSettings
from millstream.model_facts import GenerationFacts
from millstream.models.source import ModelSource


class InstantBackend:
    """Every row gets a token in every step. With a pace, a step takes as long as a device would that makes so many
    tokens per second with these rows."""

    def __init__(self, rows: int, pace: float = 0.0) -> None:
        self._rows = rows
        self._pace = pace
        self._token = 0
        self._next = 0.0

    def load(self, report: Progress = ignore_progress) -> GenerationFacts:
        return GenerationFacts(2**20, 2048, self._rows, 0, "none", "gpu (none)")

    def background_task(self, request: Generate | None) -> None:
        return None

    def memory_bytes(self) -> int:
        return 0

    def step(self, plan: Plan) -> StepResult:
        if self._pace:
            self._wait(len(plan.decode) / self._pace)
        self._token = self._token % 1000 + 300
        token = (self._token,)
        return StepResult(tuple(RowOutput(request_id, token) for request_id in plan.decode))

    def _wait(self, seconds: float) -> None:
        """Until the step is over that began when the last one did end: what the host does meanwhile costs no time."""
        now = time.perf_counter()
        self._next = max(self._next + seconds, now)
        time.sleep(self._next - now)

    def reset(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class InstantBackends:
    """Makes them; an engine process gets this by its module's name."""

    pace: float = 0.0

    def __call__(self, source: ModelSource, settings: EngineSettings) -> GenerationBackend:
        return InstantBackend(settings.max_batch, self.pace)
