"""A generation backend that costs nothing, to measure what the rest of the server costs."""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from struct import Struct

from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import GenerationBackend, Plan, RowOutput, StepResult
from millstream.engine.protocols import Progress, ignore_progress
from millstream.loading.settings import EngineSettings
from millstream.model_facts import Calibration, GenerationFacts
from millstream.models.source import ModelSource

FIRST_TOKEN, TOKENS = 300, 1000
"""The ids of the tokens that it makes, one per step, in turn."""


class StepTimes:
    """A file in which the engine's process writes when each of the latest steps ended, and how much CPU time the
    server's process had used by then. A step is known by its token."""

    _ENTRY = Struct("dd")

    def __init__(self, path: str, server: int) -> None:
        """`server`: the id of its process."""
        with Path(path).open("r+b") as file:
            file.truncate(self._ENTRY.size * TOKENS)
            self._memory = mmap.mmap(file.fileno(), 0)
        self._server_clock = (~server << 3) | 2  # how Linux names the CPU clock of a process

    def ended(self, token: int) -> None:
        now = (time.perf_counter(), time.clock_gettime(self._server_clock))
        self._ENTRY.pack_into(self._memory, (token - FIRST_TOKEN) * self._ENTRY.size, *now)

    def since(self, token: int) -> tuple[float, float]:
        """Seconds since the step of this token ended, and seconds of CPU time of the server since then."""
        ended, cpu = self._ENTRY.unpack_from(self._memory, (token - FIRST_TOKEN) * self._ENTRY.size)
        return time.perf_counter() - ended, time.clock_gettime(self._server_clock) - cpu


def cheap_prompts(step: float) -> Calibration:
    """Of a device that reads the prompts of all streams in a part of a step, so that they start as they come."""
    costs = tuple((tokens, step / 8) for tokens in (16, 256, 4096))
    return Calibration(chunks=costs, steps=((1, step), (64, step)), passes=costs)


class InstantBackend:
    """Every row gets a token in every step. With a pace, a step takes as long as a device would that makes so many
    tokens per second with these rows; or each takes so many seconds."""

    def __init__(self, rows: int, pace: float = 0.0, seconds: float = 0.0, times: StepTimes | None = None) -> None:
        self._rows = rows
        self._pace = pace
        self._seconds = seconds
        self._times = times
        self._steps = 0
        self._next = 0.0

    def load(self, report: Progress = ignore_progress) -> GenerationFacts:
        facts = GenerationFacts(2**20, 2048, self._rows, 0, "none", "gpu (none)")
        return replace(facts, calibration=cheap_prompts(self._seconds)) if self._seconds else facts

    def background_task(self, request: Generate | None) -> None:
        return None

    def memory_bytes(self) -> int:
        return 0

    def step(self, plan: Plan) -> StepResult:
        if self._pace or self._seconds:
            self._wait(self._seconds or len(plan.decode) / self._pace)
        self._steps += 1
        token = FIRST_TOKEN + self._steps % TOKENS
        if self._times is not None:
            self._times.ended(token)
        return StepResult(tuple(RowOutput(request_id, (token,)) for request_id in plan.decode))

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
    seconds: float = 0.0
    """Of a step, whatever its rows."""
    times: str = ""
    """The file of `StepTimes`, if somebody wants to know them. For an engine in a process of its own."""

    def __call__(self, source: ModelSource, settings: EngineSettings) -> GenerationBackend:
        times = StepTimes(self.times, os.getppid()) if self.times else None
        return InstantBackend(settings.max_batch, self.pace, self.seconds, times)
