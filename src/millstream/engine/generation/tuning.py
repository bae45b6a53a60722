"""Sets up generation for a model and its memory share: the scheduler, the prefix cache and its disk tier.

Chunk lengths and block sizes come from `cost_model.py`.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path

from millstream.engine.generation.chunk_sizer import ChunkSizer
from millstream.engine.generation.cost_model import Tuning, tune
from millstream.engine.generation.scheduler import GenerationScheduler
from millstream.engine.prefix_cache.blocks import BlockPrefixCache
from millstream.engine.prefix_cache.cache import NullPrefixCache, PrefixCache
from millstream.engine.prefix_cache.checkpoints import CheckpointPrefixCache
from millstream.engine.prefix_cache.disk.folder import StoreBusy
from millstream.engine.prefix_cache.disk.store import DiskStore
from millstream.engine.prefix_cache.disk.tier import DiskTier
from millstream.engine.prefix_cache.index import PrefixIndex
from millstream.model_facts import GenerationFacts

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
"""Of the files on disk; files of another version are removed."""

INDEX_BYTES = 512
"""The memory of a block in the index itself: the least that a block counts for."""

MIN_CHECKPOINT_TOKENS = 64
"""The fewest new tokens that make a checkpoint worth it: a prompt is cut there, which costs a pass."""


def prefix_cache_share(facts: GenerationFacts, memory: int | None, asked: int) -> int:
    """Bytes for the prefix cache: as asked for, but at most a quarter of what a budget leaves beside the weights."""
    if facts.prefix_sizes is None:
        return 0
    return asked if memory is None else max(0, min(asked, (memory - facts.weight_bytes) // 4))


@dataclass(frozen=True, slots=True)
class DiskTierConfig:
    """The folder of a model's disk tier, and its size in bytes."""

    folder: Path
    budget: int


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """What a generation scheduler is made from, besides the facts of its model. Plain data, so that it can cross to an
    engine process."""

    prefill_chunk: int | None = None
    """The longest chunk of one prompt while rows decode. None: see `cost_model.py`."""
    memory: int | None = None
    """Bytes for weights and caches together. None: no bound."""
    prefix_cache_bytes: int = 0
    disk: DiskTierConfig | None = None


def make_scheduler(settings: SchedulerSettings, facts: GenerationFacts) -> GenerationScheduler:
    tuning = tune(facts)
    most = settings.prefill_chunk or tuning.gentle_chunk
    sizer = ChunkSizer(most=most, least=min(tuning.shortest_chunk, most), free_seconds=tuning.free_seconds)
    share = prefix_cache_share(facts, settings.memory, settings.prefix_cache_bytes)
    return GenerationScheduler(
        max_rows=facts.max_rows,
        prefill_tokens=max(most, tuning.prefill_tokens),
        chunk_sizer=sizer,
        kv_tokens=facts.tokens_in(None if settings.memory is None else settings.memory - share),
        prefix_cache=_prefix_cache(facts, tuning, share, settings.disk),
        whole_media=facts.whole_media,
    )


def _prefix_cache(facts: GenerationFacts, tuning: Tuning, budget: int, disk: DiskTierConfig | None) -> PrefixCache:
    if not budget or facts.prefix_sizes is None:
        return NullPrefixCache()
    sizes = facts.prefix_sizes
    worth, block = tuning.min_new_tokens, tuning.block_tokens
    index = PrefixIndex(
        block=block,
        block_bytes=max(INDEX_BYTES, block * sizes.token),
        budget=budget,
        least=(max(worth, MIN_CHECKPOINT_TOKENS) if sizes.states else worth) // block,
        from_checkpoints=bool(sizes.states),
    )
    tier = None if disk is None else _disk_tier(facts, disk, block)
    if not sizes.states:
        return BlockPrefixCache(index, tier)

    def checkpoint_bytes(tokens: int) -> int:
        return INDEX_BYTES + sizes.state(tokens) + tokens % block * sizes.token

    return CheckpointPrefixCache(index, checkpoint_bytes, tier)


def _disk_tier(facts: GenerationFacts, disk: DiskTierConfig, block: int) -> DiskTier | None:
    """Returns None if the folder cannot be used: the model is served without a disk tier."""
    stamp = f"millstream-blocks-{FORMAT_VERSION} {facts.identity} {block}"
    store = DiskStore(disk.folder, disk.budget, stamp)
    try:
        store.open()
    except StoreBusy:
        log.warning("another server is using %s: the prefix cache stays in memory only", disk.folder)
        return None
    except OSError as error:
        log.warning("%s cannot be used (%s): the prefix cache stays in memory only", disk.folder, error)
        return None
    stats = store.stats()
    log.info("prefix cache on disk: %d files in %s, %.1f MiB", stats.files, disk.folder, stats.bytes / 2**20)
    return DiskTier(store, stamp, block)


def limit_context(facts: GenerationFacts, memory: int | None, prefix_cache_bytes: int) -> GenerationFacts:
    """The facts with the context that fits into memory."""
    share = prefix_cache_share(facts, memory, prefix_cache_bytes)
    tokens = facts.tokens_in(None if memory is None else memory - share)
    if tokens is None or tokens >= facts.context_length:
        return facts
    note = f"context cut from {facts.context_length} to {tokens} tokens: more do not fit its share of --memory"
    return dataclasses.replace(facts, context_length=tokens, notes=(*facts.notes, note))
