"""Runs what the first requests would otherwise pay for: on a GPU, kernels are compiled when they are first used."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.backend.generation.caches.widths import CHUNK_LENGTHS
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import GenerationBackend
from millstream.engine.generation.scheduler import GenerationScheduler
from millstream.engine.generation.tuning import PREFILL
from millstream.types import Sampling

KINDS = (
    Sampling(),
    Sampling(temperature=0.7, top_p=0.9, seed=1),
    Sampling(temperature=1.0, seed=2),
    Sampling(temperature=0.7, top_k=20, min_p=0.05, seed=3),
    Sampling(temperature=0.7, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1, seed=4),
    Sampling(logit_bias=((1, 1.0),)),
)
LENGTHS = (40, 33, 90, 1, 65, 20, 40, 38)


LONG = 1300
"""Long enough for chunks and rows whose attention is computed in parts."""


def warm_up(backend: GenerationBackend, *, max_rows: int, vocab_size: int, context_length: int) -> None:
    """Rows of every kind join, decode beside a prompt, and leave at different times; then one runs alone; then prompts
    of every usual length are read; then rows run beside a long prompt that is cut."""

    def submit(number: int, length: int, tokens: int) -> Generate:
        length = max(1, min(length, context_length - 20))
        prompt = tuple((number + place) % vocab_size for place in range(length))
        logprobs = 5 if number % 5 == 0 else None
        return Generate(number, prompt, tokens, KINDS[number % len(KINDS)], logprobs=logprobs)

    count = max(2 * len(KINDS), min(2 * max_rows, 64))
    mixed = [submit(number, LENGTHS[number % len(LENGTHS)], 3 + number % 9) for number in range(count)]
    _run(backend, GenerationScheduler(max_rows=max_rows, prefill_tokens=128), mixed)
    _, chunk, _ = PREFILL["gpu"]
    for length in CHUNK_LENGTHS:
        if length <= chunk:
            _run(backend, GenerationScheduler(max_rows=max_rows, prefill_tokens=chunk), [submit(0, length, 2)])
    beside = [submit(0, 130, 40), submit(1, 120, 40), submit(2, LONG, 4)]
    _run(backend, GenerationScheduler(max_rows=max_rows, prefill_tokens=chunk), beside)
    backend.reset()


def _run(backend: GenerationBackend, scheduler: GenerationScheduler, submits: Sequence[Generate]) -> None:
    for submit in submits:
        scheduler.submit(submit)
    while not scheduler.idle:
        plan = scheduler.plan()
        scheduler.advance(plan, backend.step(plan))
