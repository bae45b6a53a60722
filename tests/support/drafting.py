"""A scheduler that asks for drafts of random depths at random steps, whether or not they pay. It may also preempt."""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from typing import Any

from millstream.engine.generation.plan import Plan
from millstream.engine.generation.scheduler import GenerationScheduler
from millstream.engine.generation.speculation.depth import SpeculationDepth
from millstream.model_facts import GenerationFacts
from support.prefix_caches import caching_scheduler

DEPTHS = (1, 2, 4, 8, 16)


class DraftingScheduler(GenerationScheduler):
    passes = 0
    """Steps of all such schedulers that asked for drafts."""

    def __init__(self, *, seed: int, chance: float, preempt: float, **settings: Any) -> None:
        """`chance`: that a step asks for drafts; `preempt`: that it begins with a preemption."""
        super().__init__(**settings)
        self._random = random.Random(seed)
        self._chance, self._preempt = chance, preempt

    def plan(self) -> Plan:
        rows = [request.request_id for request in (*self._prefilling, *self._running.values())]
        while rows and self._random.random() < self._preempt:
            self.preempt(rows.pop(self._random.randrange(len(rows))))
        plan = super().plan()
        if not plan.decode or self._random.random() >= self._chance:
            return replace(plan, drafts=(), odds=None, guess=plan.decode)
        DraftingScheduler.passes += 1
        asked = []
        for request_id in plan.decode:
            request = self._running[request_id]
            most = min(self._random.choice(DEPTHS), request.submit.max_tokens - request.generated - 1)
            if most > 0 and request.submit.speculate and self._random.random() < 0.9:
                asked.append((request_id, most))
        return replace(plan, drafts=tuple(asked), odds=None)


def drafting(
    seed: int, facts: GenerationFacts, *, chance: float = 0.8, preempt: float = 0.0, cache: int | None = None
) -> GenerationScheduler:
    """`cache`: blocks and checkpoints in its prefix cache; None for no cache."""
    counted = SpeculationDepth(facts.drafters) if facts.drafters else None
    make = functools.partial(DraftingScheduler, seed=seed, chance=chance, preempt=preempt, speculation=counted)
    if cache is not None:
        return caching_scheduler(cache, None, facts, make)
    return make(max_rows=facts.max_rows, prefill_tokens=16, whole_media=facts.whole_media)
