"""Calibration: measures at load what chunks, decode steps and saved prefixes cost on this device with this model.

It drives the backend with plans, as a scheduler does, so every layout and kind of KV cache is measured as it runs.
`engine/generation/cost_model.py` turns the result into chunk lengths and the like.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import mlx.core as mx

from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import GenerationBackend, Plan, Prefill
from millstream.engine.generation.speculation.cost import SLOW
from millstream.engine.generation.speculation.lengths import longest_pass
from millstream.engine.prefix_cache.orders import SavePrefix
from millstream.model_facts import Calibration, GenerationFacts

MIN_WEIGHT_BYTES = 32 * 2**20
"""Smaller models are not calibrated: they are quick whatever the numbers, and what was measured would be noise."""

SECONDS = 1.0
"""The time for a calibration. A model whose shortest chunk takes longer is measured on that one alone."""

CHUNK_SECONDS = 0.7 * SECONDS
"""Of these, the time for chunks and saves; the rest is for decode steps."""

STEP_SECONDS = 0.3 * SECONDS
"""What decode steps have in any case: how prompts are read beside rows depends on them."""

LONG_RUN = SECONDS / 8
"""A chunk that takes so long is run once: whatever the first run pays for besides is little beside it."""

SUSPICIOUS = 3.0
"""A chunk that takes so many times as long as one of half its length was disturbed, or was the first of its shape. It
is run again, however long it took."""

REPEATS, SAVE_REPEATS = 2, 4
"""Runs of other chunks, and of saves. The fastest counts: whatever disturbs a run makes it slower."""

SHORTEST_CHUNK, LONGEST_CHUNK = 16, 4096
GROWTH = 1.05
"""Twice in a row, a chunk of double length that raises the throughput by less: it has stopped growing."""

SHORT_SAVE = 16
"""Tokens of the shorter of the two saves that are compared. The longer one has all tokens of a chunk."""

SLOWEST_COPY = 1e-9
"""Seconds per byte. No device copies more slowly: a save that seems to was disturbed."""

DEEP, DEEP_SECONDS, MIN_DEEP_CHUNK = 6, 0.4, 256
"""Chunks of the prompt that tells how attention grows with depth, the time for it, and its shortest chunks."""

PASS_PROMPTS, PASS_TOKENS, PASS_SECONDS = (1, 4, 16, 64), 64, 0.4 * SECONDS
"""Prompts that share a pass, the tokens of each, and the time for such passes beyond the first."""

VERIFYING_SECONDS = 0.4 * SECONDS
"""The time for passes that verify drafts, where something drafts."""
VERIFYING_LENGTHS = (17, 5, 2, 9, 3)
"""In the order in which they are measured: what is between two is read off a line."""
LONG_PASS = VERIFYING_SECONDS / 8
"""A pass that takes so long is run once."""

TOGETHER, TOGETHER_SECONDS, PREFERRED_CHUNK = 8, 0.1, 512
"""Prompts of a pass that tells what more of them cost; how long the chunk of one of them may take, and its length."""

ROWS = (1, 4, 16)
ROW_TOKENS = 8
WARM_STEPS, TIMED_STEPS = 3, 6
"""A backend may run a step ahead, so a step's own time shows only once its rows are running."""


def calibrate(
    backend: GenerationBackend,
    facts: GenerationFacts,
    *,
    available_bytes: Callable[[], int],
    now: Callable[[], float] = time.perf_counter,
) -> Calibration:
    """Owner only. Leaves the backend without rows. `available_bytes`: the memory that is left on the device."""
    return _Calibrator(backend, facts, available_bytes, now).run()


class _Calibrator:
    def __init__(
        self,
        backend: GenerationBackend,
        facts: GenerationFacts,
        available_bytes: Callable[[], int],
        now: Callable[[], float],
    ) -> None:
        self._backend = backend
        self._facts = facts
        self._available_bytes = available_bytes
        self._now = now
        self._started = now()
        self._numbers = itertools.count(1)
        self._workspace_bytes = 0
        self._verifying: list[tuple[int, int, float]] = []
        """(rows, length, seconds) of passes that verify drafts."""
        self._verifying_seconds = 0.0
        self._spans_steps = False
        """True if the backend computes a chunk over several steps while rows decode."""
        self._saves: list[tuple[int, float]] = []
        """(bytes, seconds) of a short and a long save of the longest chunk so far."""

    def run(self) -> Calibration:
        chunks = self._chunks()
        depth_cost = self._depth_cost(chunks)
        steps = self._steps(chunks)
        passes = self._passes(chunks) if self._spans_steps else []
        together = self._together(chunks) if self._facts.shares_passes else None
        self._backend.reset()
        costs = _save_cost(self._saves)
        return Calibration(
            tuple(chunks),
            tuple(steps),
            *costs,
            self._workspace_bytes,
            depth_cost,
            tuple(passes),
            together,
            tuple(sorted(self._verifying)),
        )

    def _depth_cost(self, chunks: list[tuple[int, float]]) -> float:
        """Run several chunks of one prompt and compare the last with the first: attention reads all tokens before. Only
        with chunks that are quick enough."""
        fitting = [
            length
            for length, seconds in chunks
            if DEEP * seconds <= DEEP_SECONDS and DEEP * length + 2 <= self._facts.context_length
        ]
        if not fitting or fitting[-1] < MIN_DEEP_CHUNK:
            return 0.0
        length = fitting[-1]
        request = self._request(DEEP * length + 2)
        starts = range(0, DEEP * length, length)
        times = [self._timed(Plan(prefill=(Prefill(request, start, start + length),))) for start in starts]
        self._backend.step(Plan(drop=(request.request_id,)))
        return max(0.0, times[-1] / min(times) - 1) / ((DEEP - 1) * length)

    def _chunks(self) -> list[tuple[int, float]]:
        """Double the length until the throughput stops growing, or until time or memory would run out."""
        longest = max(1, min(LONGEST_CHUNK, self._facts.context_length - 2))
        length = min(SHORTEST_CHUNK, longest)
        found = [(length, self._chunk(length))]
        stalled = 0
        while stalled < 2 and length * 2 <= longest and self._in_bounds(2 * found[-1][1]):
            best = max(tokens / seconds for tokens, seconds in found)
            length *= 2
            found.append((length, self._chunk(length, SUSPICIOUS * found[-1][1])))
            stalled = 0 if length / found[-1][1] > GROWTH * best else stalled + 1
        return found

    def _in_bounds(self, seconds: float) -> bool:
        """True if there is time for a chunk of `seconds`, and for twice the memory of the last one."""
        needed = seconds * (1 if seconds >= LONG_RUN else REPEATS)
        return self._in_time(needed, CHUNK_SECONDS) and 4 * self._workspace_bytes <= self._available_bytes()

    def _chunk(self, length: int, suspicious: float = float("inf")) -> float:
        """Seconds of a chunk; measures its workspace and the cost of saving it as well. A run that takes longer than
        `suspicious` is repeated."""
        best = float("inf")
        peaks: list[int] = []
        for repeat in range(REPEATS):
            request = self._request(length + 2)  # not complete after the chunk, so that no row joins
            mx.reset_peak_memory()
            seconds = self._timed(Plan(prefill=(Prefill(request, 0, length),)))
            # Keys and values of the chunk are active now, and are counted per token elsewhere.
            peaks.append(max(0, mx.get_peak_memory() - mx.get_active_memory()))
            best = min(best, seconds)
            last = repeat == REPEATS - 1 or LONG_RUN <= seconds <= suspicious
            if last:
                self._save(request, length)
            self._backend.step(Plan(drop=(request.request_id,)))
            if last:
                break
        self._workspace_bytes = min(peaks)  # more than that was another engine's: MLX counts per process
        return best

    def _save(self, request: Generate, length: int) -> None:
        sizes = self._facts.prefix_sizes
        if sizes is not None:
            short = min(SHORT_SAVE, length)
            tokens = (short, length // short * short)
            self._saves = [(each * sizes.token, self._saving(request, length, each // short, short)) for each in tokens]

    def _saving(self, request: Generate, position: int, blocks: int, block: int) -> float:
        """Seconds to save the first `blocks` of a prompt in prefill, and its state if that cannot be cut: a chunk
        without tokens."""
        sizes = self._facts.prefix_sizes
        times = []
        for _ in range(SAVE_REPEATS):
            handles = tuple(next(self._numbers) for _ in range(blocks))
            state = next(self._numbers) if sizes is not None and sizes.states else None
            order = SavePrefix(request.request_id, 0, block, handles, state, tokens=position)
            times.append(self._timed(Plan(prefill=(Prefill(request, position, position, save=order),))))
            self._backend.step(Plan(evict=order.all_handles))
        return min(times)

    def _steps(self, chunks: list[tuple[int, float]]) -> list[tuple[int, float]]:
        """Let rows join and time their steps, while there is time; one row in any case. Then the same rows verify
        drafts."""
        found: list[tuple[int, float]] = []
        running: tuple[int, ...] = ()
        expected = 0.0
        end = max(SECONDS, self._now() - self._started + STEP_SECONDS)
        for rows in ROWS:
            if rows > self._facts.max_rows or (found and not self._in_time(expected, end)):
                break
            joining = [self._request(ROW_TOKENS + 1) for _ in range(rows - len(running))]
            prompts = tuple(Prefill(request, 0, len(request.prompt) - 1) for request in joining)
            started = self._now()
            self._spans_steps = self._backend.step(Plan(prefill=prompts, decode=running)).prefilling
            joined = self._now() - started
            running += tuple(request.request_id for request in joining)
            found.append((rows, self._step(running, end)))
            expected = 4 * joined + 2 * (WARM_STEPS + 1) * found[-1][1]
            end += self._verify(running, found[-1][1], chunks)
        self._backend.step(Plan(drop=running))
        return found

    def _verify(self, running: tuple[int, ...], step: float, chunks: list[tuple[int, float]]) -> float:
        """Passes of several tokens per row, while there is time. Returns how long it took in all."""
        if not self._facts.drafters:
            return 0.0
        started, rows = self._now(), len(running)
        widest = self._facts.widest_pass(rows)
        for length in VERIFYING_LENGTHS:
            tokens = rows * length
            fits = length <= longest_pass(rows) and (widest is None or tokens <= widest)
            if fits and self._has_time(_expected(tokens, [(rows, step), *chunks])):
                self._verify_length(running, length, suspicious=SLOW * length * step)
        return self._now() - started

    def _verify_length(self, running: tuple[int, ...], length: int, *, suspicious: float) -> None:
        """The faster of two passes, since the first of a kind may trace a graph. One that takes long is not repeated
        unless it takes longer than `suspicious`; one that still does is not believed."""
        plan = Plan(decode=running, drafts=tuple((row, length - 1) for row in running))
        best = float("inf")
        for _ in range(REPEATS):
            result = self._backend.step(plan)
            if result.length != length:
                return
            seconds = result.pass_seconds
            self._verifying_seconds += seconds
            best = min(best, seconds)
            if LONG_PASS <= seconds <= suspicious or not self._has_time(min(seconds, suspicious)):
                break
        if best <= suspicious:
            self._verifying.append((len(running), length, best))

    def _has_time(self, seconds: float) -> bool:
        return self._verifying_seconds + seconds <= VERIFYING_SECONDS

    def _passes(self, chunks: list[tuple[int, float]]) -> list[tuple[int, float]]:
        """Let whole prompts share passes while there is time, none longer than the longest chunk; one in any case."""
        found: list[tuple[int, float]] = []
        longest = min(chunks[-1][0], PASS_TOKENS * self._facts.max_rows)
        end = self._now() - self._started + PASS_SECONDS
        for prompts in PASS_PROMPTS:
            tokens = prompts * PASS_TOKENS
            expected = REPEATS * next((seconds for length, seconds in chunks if length >= tokens), 0.0)
            if found and (tokens > longest or not self._in_time(expected, end)):
                break
            found.append((tokens, min(self._pass(prompts) for _ in range(REPEATS))))
        return found

    def _together(self, chunks: list[tuple[int, float]]) -> tuple[int, int, float]:
        """A pass over several prompts, each with a chunk that was measured alone."""
        prompts = min(TOGETHER, self._facts.max_rows)
        fitting = [length for length, seconds in chunks if seconds <= TOGETHER_SECONDS and length <= PREFERRED_CHUNK]
        length = fitting[-1] if fitting else chunks[0][0]
        return prompts, length, min(self._pass(prompts, length) for _ in range(REPEATS))

    def _pass(self, prompts: int, tokens: int = PASS_TOKENS) -> float:
        requests = [self._request(tokens + 1) for _ in range(prompts)]
        chunks = tuple(Prefill(request, 0, len(request.prompt) - 1) for request in requests)
        seconds = self._timed(Plan(prefill=chunks))
        self._backend.step(Plan(drop=tuple(request.request_id for request in requests)))
        return seconds

    def _step(self, running: tuple[int, ...], end: float) -> float:
        """Median seconds of a few steps. The fastest would not do: the work of one step may show in the next one, and
        the first may find its tokens there already."""
        for _ in range(WARM_STEPS):
            self._backend.step(Plan(decode=running))
        times = [self._timed(Plan(decode=running))]
        while len(times) < TIMED_STEPS and self._in_time(times[-1], end):
            times.append(self._timed(Plan(decode=running)))
        return statistics.median(times)

    def _in_time(self, seconds: float, end: float) -> bool:
        """True if work of `seconds` ends in time, `end` seconds after the start."""
        return self._now() - self._started + seconds <= end

    def _request(self, length: int) -> Generate:
        length = max(1, min(length, self._facts.context_length))
        tokens = tuple(index % self._facts.vocab_size for index in range(length))
        return Generate(next(self._numbers), tokens, max_tokens=1)

    def _timed(self, plan: Plan) -> float:
        started = self._now()
        self._backend.step(plan)
        return max(self._now() - started, 1e-9)


def _expected(tokens: int, known: list[tuple[int, float]]) -> float:
    """What a pass of so many tokens takes, about: on the line between two that are known, and beyond the last one in
    proportion."""
    known = sorted(known)
    for (few, short), (many, long) in itertools.pairwise(known):
        if few <= tokens <= many:
            return short + (long - short) * (tokens - few) / max(1, many - few)
    (nearest, seconds) = known[-1] if tokens > known[-1][0] else known[0]
    return seconds * max(1.0, tokens / nearest)


def _save_cost(saves: list[tuple[int, float]]) -> tuple[float, float]:
    """The fixed cost of a save, taken from the short one, whose bytes cost next to nothing; and its cost per byte."""
    if not saves:
        return 0.0, 0.0
    (few, short), (many, long) = saves
    per_byte = max(0.0, long - short) / (many - few) if many > few else 0.0
    return short, min(per_byte, SLOWEST_COPY)
