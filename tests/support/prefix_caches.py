"""Schedulers whose prefix cache has small blocks, so that short prompts have several."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from millstream.engine.generation.scheduler import GenerationScheduler
from millstream.engine.prefix_cache.blocks import BlockPrefixCache
from millstream.engine.prefix_cache.checkpoints import CheckpointPrefixCache
from millstream.engine.prefix_cache.disk.store import DiskStore
from millstream.engine.prefix_cache.disk.tier import DiskTier
from millstream.engine.prefix_cache.index import PrefixIndex
from millstream.model_facts import GenerationFacts

BLOCK = 4


def caching_scheduler(
    budget: int,
    disk: Path | None,
    facts: GenerationFacts,
    make: Callable[..., GenerationScheduler] = GenerationScheduler,
) -> GenerationScheduler:
    """Every block and every checkpoint counts as one byte."""
    assert facts.prefix_sizes is not None
    from_checkpoints = bool(facts.prefix_sizes.states)
    index = PrefixIndex(block=BLOCK, block_bytes=1, budget=budget, from_checkpoints=from_checkpoints)
    tier = None
    if disk is not None:
        store = DiskStore(disk, 2**30, facts.identity)
        store.open()
        tier = DiskTier(store, facts.identity, BLOCK)
    cache = (
        CheckpointPrefixCache(index, lambda tokens: 1, tier)
        if from_checkpoints
        else BlockPrefixCache(index, tier, share_tokens=facts.share_tokens)
    )
    return make(max_rows=facts.max_rows, prefill_tokens=7, prefix_cache=cache, whole_media=facts.whole_media)
