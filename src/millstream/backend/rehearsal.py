"""Runs what the first requests would otherwise pay for: on a GPU, kernels are compiled when they are first used."""

from __future__ import annotations

from millstream.engine.backend import BatchBackend
from millstream.engine.messages import Submit
from millstream.engine.scheduler import Scheduler
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


def rehearse(backend: BatchBackend, *, max_rows: int, vocab_size: int, context_length: int) -> None:
    """Rows of every kind join, decode beside a prompt, and leave at different times; then one runs alone."""
    scheduler = Scheduler(max_rows=max_rows, prefill_tokens=128)
    for number in range(max(2 * len(KINDS), min(2 * max_rows, 64))):
        length = min(LENGTHS[number % len(LENGTHS)], context_length - 20)
        prompt = tuple((number + place) % vocab_size for place in range(max(1, length)))
        submit = Submit(
            number, prompt, 3 + number % 9, KINDS[number % len(KINDS)], logprobs=5 if number % 5 == 0 else None
        )
        scheduler.submit(submit)
    while not scheduler.idle:
        plan = scheduler.plan()
        scheduler.advance(plan, backend.step(plan))
    backend.reset()
