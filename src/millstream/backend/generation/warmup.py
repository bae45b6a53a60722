"""Warm-up: runs requests of every kind at load, since a GPU compiles kernels when they are first used."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from millstream.backend.generation.batch import Batch
from millstream.backend.generation.caches.widths import CHUNK_LENGTHS, MAX_PADDED_CHUNK
from millstream.backend.generation.prefill.prefiller import Prefiller
from millstream.backend.kernels.matmul_tilings import MANY_WIDTHS
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import GenerationBackend, Prefill
from millstream.engine.generation.scheduler import GenerationScheduler
from millstream.engine.generation.speculation.lengths import LENGTHS as LENGTHS_OF_PASSES
from millstream.engine.protocols import Progress
from millstream.types import Sampling

SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.7, top_p=0.9, seed=1),
    Sampling(temperature=1.0, seed=2),
    Sampling(temperature=0.7, top_k=20, min_p=0.05, seed=3),
    Sampling(temperature=0.7, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1, seed=4),
    Sampling(logit_bias=((1, 1.0),)),
)
LENGTHS = (40, 33, 90, 1, 65, 20, 40, 38)
LONG = 1300
"""Tokens of a prompt so long that attention is computed in parts."""


PASSES = ((1, LENGTHS_OF_PASSES[1:]), (2, (5, 17)), (3, (3,)), (4, (9,)), (5, (2,)), (7, (5,)), (16, (2, 3, 5, 9)))
"""Rows, and lengths of passes, that take every width for up to 8 rows, and what is tried first with 9 to 16."""
_CHUNKS = tuple(length for length in CHUNK_LENGTHS if length <= MAX_PADDED_CHUNK)
"""Calibration runs longer ones, if they are not too slow here."""
RUNS = 4 + len(_CHUNKS)
OTHER_STEPS = 4
"""Of a backend's load, after its weights are read: shape the layers, choose a layout, measure its memory, calibrate."""


class WarmupProgress:
    """Reports the progress of a load after the weights are read, step by step."""

    def __init__(self, report: Progress, *, runs: int) -> None:
        """`runs`: how many runs of `warm_up` there will be."""
        self._report = report
        self._total = OTHER_STEPS + runs
        self._done = 0
        report(0.0, "warming up")

    def advance(self) -> None:
        self._done += 1
        self._report(min(1.0, self._done / self._total), "warming up")


def warm_up(
    backend: GenerationBackend,
    *,
    max_rows: int,
    vocab_size: int,
    context_length: int,
    passes: Callable[[], None] = lambda: None,
    after_run: Callable[[str], None] = lambda name: None,
) -> None:
    """Rows with all kinds of sampling join, decode during prefill, and leave at different times, until one runs alone.
    Then prompts of every usual chunk length are prefilled, rows decode while a long prompt is prefilled in chunks, and
    as many rows as there may be decode together. At last `passes` runs those that verify drafts. `after_run` is called
    with the name of each of the `RUNS`."""

    def run(name: str, prefill_tokens: int, submits: Sequence[Generate]) -> None:
        _run(backend, GenerationScheduler(max_rows=max_rows, prefill_tokens=prefill_tokens), submits)
        after_run(name)

    def submit(number: int, length: int, tokens: int) -> Generate:
        length = max(1, min(length, context_length - 20))
        prompt = tuple((number + index) % vocab_size for index in range(length))
        logprobs = 5 if number % 5 == 0 else None
        return Generate(number, prompt, tokens, SAMPLINGS[number % len(SAMPLINGS)], logprobs=logprobs)

    count = max(2 * len(SAMPLINGS), min(2 * max_rows, 64))
    mixed = [submit(number, LENGTHS[number % len(LENGTHS)], 3 + number % 9) for number in range(count)]
    run("all kinds of sampling", 128, mixed)
    for length in _CHUNKS:
        run(f"chunk of {length}", MAX_PADDED_CHUNK, [submit(0, length, 2)])
    run("long prompt", MAX_PADDED_CHUNK, [submit(0, 130, 40), submit(1, 120, 40), submit(2, LONG, 4)])
    # All rows at once, and every width of many rows: such forward passes have kernels of their own.
    for rows in (width for width in MANY_WIDTHS if width < max_rows):
        scheduler = GenerationScheduler(max_rows=max_rows, prefill_tokens=MAX_PADDED_CHUNK)
        _run(backend, scheduler, [submit(number, 2, 3) for number in range(rows)])
    run("all rows", MAX_PADDED_CHUNK, [submit(number, 2, 3) for number in range(max_rows)])
    backend.reset()
    passes()
    after_run("drafts")


def warm_up_passes(make: Callable[[], tuple[Batch, Prefiller]], *, max_rows: int, vocab_size: int) -> None:
    """Passes that verify drafts, of every length, for few rows: with many, drafts hardly ever pay. `make` gives a batch
    without rows."""
    for rows, lengths in PASSES:
        if rows > max_rows:
            break
        batch, prefiller = make()
        prompt = tuple(index % vocab_size for index in range(9))
        submits = [Generate(number, prompt, 99) for number in range(rows)]
        mx.eval(prefiller.prefill([Prefill(submit, 0, len(prompt) - 1) for submit in submits]))
        batch.join(*prefiller.take([submit.request_id for submit in submits]))
        for length in lengths if batch.supports_length else ():
            batch.verify({0: prompt[:1] * (length - 1)})


def _run(backend: GenerationBackend, scheduler: GenerationScheduler, submits: Sequence[Generate]) -> None:
    for submit in submits:
        scheduler.submit(submit)
    while not scheduler.idle:
        plan = scheduler.plan()
        scheduler.advance(plan, backend.step(plan))
