"""The last part of a warm-up: streams that start together, as the first users' will, by the plans of a real scheduler.

What is new to a GPU is slow once: a pass of another length is traced, MLX makes a CUDA graph for each order of
launches, memory of another size is allocated. Which of these come up is decided by a scheduler that knows what this
device was measured to be good at. So they come up here, and not beside the first streams.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from itertools import islice

from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import GenerationBackend
from millstream.engine.generation.scheduler import GenerationScheduler
from millstream.engine.messages import Finished

SECONDS = 2.0
"""For all bursts. A model whose steps are long has fewer of them."""

BURSTS = ((3, 0), (16, 200), (1, 0), (64, 200))
"""How many requests arrive in a step, and how many tokens of a system prompt they share."""

PROMPT = (60, 160)
"""Tokens of a prompt beside that, at least and at most: most chats begin so."""

OUTPUT = 20
"""Tokens of each answer. All streams of a burst end together, and begin again."""

BURST_CONTEXT = PROMPT[1] + OUTPUT + max(shared for _, shared in BURSTS)
"""What a model must take for that."""

BURST_PREFIX_CACHE = 2**28
"""Bytes for the prefix cache of such a scheduler: enough that it saves, and evicts."""


def run_bursts(
    backend: GenerationBackend,
    scheduler: GenerationScheduler,
    *,
    rows: int,
    vocab_size: int,
    seconds: float = SECONDS,
    now: Callable[[], float] = time.monotonic,
) -> int:
    """Owner only. Leaves the backend without rows. `scheduler`: one of those that will run here. Returns how many
    bursts have come to their end."""
    until = now() + seconds
    draw, done = random.Random(0), 0
    for arrivals, shared in BURSTS:
        requests = _requests(draw, vocab_size, 2 * rows * done, shared)
        if not _burst(backend, scheduler, requests, rows, arrivals, until, now):
            break
        done += 1
    backend.reset()
    return done


def _burst(
    backend: GenerationBackend,
    scheduler: GenerationScheduler,
    requests: Iterator[Generate],
    rows: int,
    arrivals: int,
    until: float,
    now: Callable[[], float],
) -> bool:
    """As many streams as there may be rows, of two requests each. False if the time is over."""
    first, second = list(islice(requests, rows)), list(islice(requests, rows))
    while first or second or not scheduler.idle:
        for request in first[:arrivals]:
            scheduler.submit(request)
        del first[:arrivals]
        plan, started = scheduler.plan(), now()
        result = backend.step(plan)
        ended = now()
        events = scheduler.advance(plan, result, ended - started)
        for request in second[: sum(isinstance(event, Finished) for event in events)]:
            scheduler.submit(request)
            second.remove(request)
        if ended >= until:
            return False
    return True


def _requests(draw: random.Random, vocab_size: int, first: int, shared: int) -> Iterator[Generate]:
    """Prompts that share so many tokens and no more, numbered from `first` on."""
    prefix = _tokens(draw, vocab_size, shared)
    for number in itertools.count(first):
        yield Generate(number, prefix + _tokens(draw, vocab_size, draw.randint(*PROMPT)), OUTPUT)


def _tokens(draw: random.Random, vocab_size: int, count: int) -> tuple[int, ...]:
    return tuple(draw.randrange(vocab_size) for _ in range(count))
