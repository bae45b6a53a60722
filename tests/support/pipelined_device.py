"""A simulated device that runs behind its host, as a GPU does: what a plan costs each of them, and when tokens come."""

from __future__ import annotations

from dataclasses import dataclass, field

from millstream.engine.generation.plan import Plan, Prefill, RowOutput, StepResult
from millstream.model_facts import Calibration, GenerationFacts

CALIBRATED_ROWS = (1, 4, 16)


@dataclass
class PipelinedDevice:
    """The host launches a decode step, builds and launches chunks, then waits for the decode step before. The device
    computes what it was given in order. All costs are in seconds."""

    steps: tuple[tuple[int, float], ...]
    """(rows, seconds of a decode step on the device)."""
    launch: float
    """Of the host, for a decode step."""
    build: float
    """Of the host, for the graph of a prefill pass."""
    join: float
    """Of the host, for rows that join, however many."""
    encode: float
    """Of the host, to launch a prefill pass."""
    token: float
    """Of the device, for each token of a pass."""
    weights: float
    """Of the device, for a pass, however few tokens it has."""
    drop: float = 0.0
    """Of the host, for rows that leave, however many."""
    new_shape: float = 0.0
    """Of the host, to launch a pass with a number of tokens that has not run yet: memory and graphs."""
    spans: bool = True
    """Whether passes may span steps. Those of a CPU do not."""
    calibrated_rows: tuple[int, ...] = CALIBRATED_ROWS
    """What a load has the time to measure of decode steps."""
    mistaken: float = 1.0
    """What it finds for them, relative to what they cost."""
    clock: float = 0.0
    _free_at: float = 0.0
    _tokens_at: float = 0.0
    _rows: tuple[int, ...] = ()
    _pending: list[tuple[float, float]] = field(default_factory=list)
    _shapes: set[int] = field(default_factory=set)

    def facts(self, rows: int = 64) -> GenerationFacts:
        """As a load would report it."""
        lengths = [2**power for power in range(4, 13)]
        chunks = tuple((length, self.build + self.encode + self._computing(length)) for length in lengths)
        steps = tuple((count, self.mistaken * self.decoding(count)) for count in self.calibrated_rows)
        passes = chunks[2::2] if self.spans else ()
        measured = Calibration(chunks, steps, save_seconds=0.00038, save_seconds_per_byte=2e-12, passes=passes)
        return GenerationFacts(
            2**20,
            2048,
            rows,
            2**31,
            "none",
            "gpu (simulated)",
            kv_bytes_per_token=2**15,
            calibration=measured,
        )

    def run(self, plan: Plan) -> tuple[StepResult, float]:
        """Returns the result, and seconds of the host."""
        started = self.clock
        if set(plan.drop) & set(self._rows):
            self.clock += self.drop
        if set(plan.decode) - set(self._rows):
            self.clock += self.join
        read, self._rows, tokens_at = self._rows, plan.decode, self._tokens_at
        if plan.decode:
            self._launch(self.launch, self.decoding(len(plan.decode)))
            self._tokens_at = self._free_at
        may_span = self.spans and bool(plan.decode) and not plan.complete_prefill
        assert not (plan.decode and plan.prefill and self._pending), "a chunk was planned while another spans steps"
        if plan.prefill:
            passes = _passes(plan.prefill)
            self.clock += self.build * len(passes)
            unseen = set(passes) - self._shapes
            self._shapes |= unseen
            work = self.encode * len(passes) + self.new_shape * len(unseen), sum(map(self._computing, passes))
            parts = plan.prefill_parts or 4
            self._pending = [(work[0] / parts, work[1] / parts)] * parts if may_span else [work]
            if not may_span:
                self._launch(*self._pending.pop())
        elif self._pending:
            due = [self._pending.pop(0)] if may_span else self._pending
            self._pending = self._pending if may_span else []
            for work in due:
                self._launch(*work)
        self.clock = max(self.clock, tokens_at if plan.decode else self._free_at)
        rows = tuple(RowOutput(request_id, (1,)) for request_id in read if request_id in plan.decode)
        return StepResult(rows, prefilling=bool(self._pending and plan.decode)), self.clock - started

    def _launch(self, host: float, device: float) -> None:
        """What is launched runs once the device is free; the host is busy with it until then at least in part."""
        self._free_at = max(self._free_at, self.clock) + max(device, host)
        self.clock += host

    def decoding(self, rows: int) -> float:
        """Seconds of a decode step on the device."""
        (low, least), *others = self.steps
        for high, most in others:
            if rows <= high:
                return least + (most - least) * max(0, rows - low) / (high - low)
            low, least = high, most
        return least * rows / low

    def _computing(self, tokens: int) -> float:
        return self.weights + tokens * self.token


def _passes(chunks: tuple[Prefill, ...]) -> list[int]:
    """Tokens of each pass: whole prompts share one, padded to the longest."""
    whole = [chunk.end for chunk in chunks if not chunk.start and chunk.joins and chunk.end]
    if len(whole) < 2:
        return [chunk.end - chunk.start for chunk in chunks]
    others = [chunk.end - chunk.start for chunk in chunks if chunk.start or not chunk.joins]
    return [len(whole) * max(whole), *others]
