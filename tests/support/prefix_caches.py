"""Schedulers whose prefix cache has small blocks, so that short prompts have many."""

from __future__ import annotations

from pathlib import Path

from millstream.engine.generation.scheduler import Scheduler
from millstream.engine.prefix_cache.cache import CheckpointPrefixCache, PrefixCache
from millstream.engine.prefix_cache.disk.store import DiskStore
from millstream.engine.prefix_cache.disk.tier import DiskTier
from millstream.engine.prefix_cache.index import PrefixIndex
from millstream.types import ModelFacts

BLOCK = 4


def caching_scheduler(budget: int, disk: Path | None, facts: ModelFacts) -> Scheduler:
    """Every block and every checkpoint counts as one byte."""
    assert facts.prefix_sizes is not None
    states = bool(facts.prefix_sizes.states)
    index = PrefixIndex(block=BLOCK, block_bytes=1, budget=budget, from_states=states)
    shelf = None
    if disk is not None:
        store = DiskStore(disk, 2**30, facts.identity)
        store.open()
        shelf = DiskTier(store, facts.identity, BLOCK)
    keeper = CheckpointPrefixCache(index, lambda tokens: 1, shelf) if states else PrefixCache(index, shelf)
    return Scheduler(max_rows=facts.max_rows, prefill_tokens=7, keeper=keeper, whole_media=facts.whole_media)
