"""Warm-up: runs requests of every kind at load, since a GPU compiles kernels when they are first used."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.backend.generation.caches.widths import CHUNK_LENGTHS, MAX_PADDED_CHUNK
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import GenerationBackend
from millstream.engine.generation.scheduler import GenerationScheduler
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


def warm_up(backend: GenerationBackend, *, max_rows: int, vocab_size: int, context_length: int) -> None:
    """Rows with all kinds of sampling join, decode during prefill, and leave at different times, until one runs alone.
    Then prompts of every usual chunk length are prefilled, rows decode while a long prompt is prefilled in chunks, and
    as many rows as there may be decode together."""

    def submit(number: int, length: int, tokens: int) -> Generate:
        length = max(1, min(length, context_length - 20))
        prompt = tuple((number + index) % vocab_size for index in range(length))
        logprobs = 5 if number % 5 == 0 else None
        return Generate(number, prompt, tokens, SAMPLINGS[number % len(SAMPLINGS)], logprobs=logprobs)

    count = max(2 * len(SAMPLINGS), min(2 * max_rows, 64))
    mixed = [submit(number, LENGTHS[number % len(LENGTHS)], 3 + number % 9) for number in range(count)]
    _run(backend, GenerationScheduler(max_rows=max_rows, prefill_tokens=128), mixed)
    chunk = MAX_PADDED_CHUNK  # calibration runs longer ones, if they are not too slow here
    for length in CHUNK_LENGTHS:
        if length <= chunk:
            _run(backend, GenerationScheduler(max_rows=max_rows, prefill_tokens=chunk), [submit(0, length, 2)])
    rows_and_prompt = [submit(0, 130, 40), submit(1, 120, 40), submit(2, LONG, 4)]
    _run(backend, GenerationScheduler(max_rows=max_rows, prefill_tokens=chunk), rows_and_prompt)
    # All rows at once: the widest forward pass has kernels of its own.
    together = [submit(number, 2, 3) for number in range(max_rows)]
    _run(backend, GenerationScheduler(max_rows=max_rows, prefill_tokens=chunk), together)
    backend.reset()


def _run(backend: GenerationBackend, scheduler: GenerationScheduler, submits: Sequence[Generate]) -> None:
    for submit in submits:
        scheduler.submit(submit)
    while not scheduler.idle:
        plan = scheduler.plan()
        scheduler.advance(plan, backend.step(plan))
