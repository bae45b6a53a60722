"""A scheduler that preempts rows at random steps, whether or not memory is short."""

from __future__ import annotations

import functools
import random
from typing import Any

from millstream.engine.generation.plan import Plan
from millstream.engine.generation.scheduler import GenerationScheduler
from millstream.model_facts import GenerationFacts
from support.prefix_caches import caching_scheduler

CHANCE = 0.12
"""That a step begins with a preemption."""


class PreemptingScheduler(GenerationScheduler):
    preemptions = 0
    """Of all schedulers of this kind."""

    def __init__(self, *, seed: int, **settings: Any) -> None:
        super().__init__(**settings)
        self._draw = random.Random(seed)

    def plan(self) -> Plan:
        rows = [request.request_id for request in (*self._prefilling, *self._running.values())]
        while rows and self._draw.random() < CHANCE:
            PreemptingScheduler.preemptions += 1
            self.preempt(rows.pop(self._draw.randrange(len(rows))))
        return super().plan()


def preempting(seed: int, facts: GenerationFacts, *, cache: int | None = None) -> GenerationScheduler:
    """`cache`: blocks and checkpoints in its prefix cache; None for no cache."""
    make = functools.partial(PreemptingScheduler, seed=seed)
    if cache is not None:
        return caching_scheduler(cache, None, facts, make)
    return make(max_rows=facts.max_rows, prefill_tokens=16, whole_media=facts.whole_media)
