"""Schedulers whose prefix cache has small blocks, so that short prompts have many."""

from __future__ import annotations

from pathlib import Path

from millstream.engine.generation.scheduler import GenerationScheduler
from millstream.engine.prefix_cache.blocks import BlockPrefixCache
from millstream.engine.prefix_cache.checkpoints import CheckpointPrefixCache
from millstream.engine.prefix_cache.disk.store import DiskStore
from millstream.engine.prefix_cache.disk.tier import DiskTier
from millstream.engine.prefix_cache.index import PrefixIndex
from millstream.model_facts import GenerationFacts

BLOCK = 4


def caching_scheduler(budget: int, disk: Path | None, facts: GenerationFacts) -> GenerationScheduler:
    """Every block and every checkpoint counts as one byte."""
    assert facts.prefix_sizes is not None
    states = bool(facts.prefix_sizes.states)
    index = PrefixIndex(block=BLOCK, block_bytes=1, budget=budget, from_checkpoints=states)
    tier = None
    if disk is not None:
        store = DiskStore(disk, 2**30, facts.identity)
        store.open()
        tier = DiskTier(store, facts.identity, BLOCK)
    cache = CheckpointPrefixCache(index, lambda tokens: 1, tier) if states else BlockPrefixCache(index, tier)
    return GenerationScheduler(
        max_rows=facts.max_rows, prefill_tokens=7, prefix_cache=cache, whole_media=facts.whole_media
    )
