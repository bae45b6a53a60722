"""Sets up generation for a model and its memory share: the scheduler, the prefix cache and its disk tier.

Chunk lengths and block sizes come from `cost_model.py`.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path

from millstream.engine.generation.chunk_sizer import MAX_GAP, ChunkSizer
from millstream.engine.generation.cost_model import Tuning, tune
from millstream.engine.generation.kv_budget import KvBudget, tokens_for_row
from millstream.engine.generation.scheduler import GenerationScheduler
from millstream.engine.generation.speculation.cost import StepCosts
from millstream.engine.generation.speculation.depth import SpeculationDepth
from millstream.engine.prefix_cache.blocks import BlockPrefixCache
from millstream.engine.prefix_cache.cache import NullPrefixCache, PrefixCache
from millstream.engine.prefix_cache.checkpoints import CheckpointPrefixCache
from millstream.engine.prefix_cache.disk.folder import StoreBusy
from millstream.engine.prefix_cache.disk.store import DiskStore
from millstream.engine.prefix_cache.disk.tier import DiskTier
from millstream.engine.prefix_cache.index import PrefixIndex
from millstream.model_facts import LEAST_TOKENS, GenerationFacts

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
"""Of the files on disk; files of another version are removed."""

INDEX_BYTES = 512
"""The memory of a block in the index itself: the least that a block counts for."""

MIN_CHECKPOINT_TOKENS = 64
"""The fewest new tokens that make a checkpoint worth it: a prompt is cut there, which costs a pass."""


DEFAULT_PREFIX_CACHE = 2**30
"""Bytes for the prefix cache if nobody said how many and there is room; an eighth of the room if that is more."""


def prefix_cache_share(facts: GenerationFacts, memory: int | None, asked: int | None) -> int:
    """Bytes for the prefix cache: as asked for, but at most a quarter of what a budget, or else the device, leaves
    beside the weights. If nothing was asked for, an eighth of that is enough for the conversations of a few agents on a
    large device, and a fixed size on a small one."""
    if facts.prefix_sizes is None:
        return 0
    bound = facts.memory_bound(memory)
    if bound is None:
        return DEFAULT_PREFIX_CACHE if asked is None else asked
    room = bound - facts.weight_bytes
    return max(0, min(max(DEFAULT_PREFIX_CACHE, room // 8) if asked is None else asked, room // 4))


def kv_budget(facts: GenerationFacts, memory: int | None, prefix_cache_bytes: int | None) -> KvBudget:
    """What is left for the KV caches of rows and of prompts in prefill."""
    share = prefix_cache_share(facts, memory, prefix_cache_bytes)
    return KvBudget(facts.tokens_in(memory, share), facts.kv_layout, facts.windows)


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
    """Bytes for weights and caches together. None: what the device has."""
    prefix_cache_bytes: int | None = 0
    """None: see `prefix_cache_share`."""
    disk: DiskTierConfig | None = None
    max_token_gap: float = MAX_GAP
    """Seconds between two tokens of a stream that prefill may cause."""


def make_scheduler(settings: SchedulerSettings, facts: GenerationFacts) -> GenerationScheduler:
    tuning = tune(facts)
    most = settings.prefill_chunk or tuning.gentle_chunk
    sizer = ChunkSizer(
        most=most,
        least=min(tuning.shortest_chunk, most),
        longest=settings.prefill_chunk or max(most, tuning.longest_chunk),
        free_seconds=tuning.free_seconds,
        fixed_seconds=tuning.fixed_seconds,
        max_gap=settings.max_token_gap,
        token_seconds=tuning.token_seconds,
        gentle_token_seconds=tuning.gentle_token_seconds,
        steps=tuning.steps,
        passes=tuning.passes,
    )
    share = prefix_cache_share(facts, settings.memory, settings.prefix_cache_bytes)
    return GenerationScheduler(
        max_rows=facts.max_rows,
        prefill_tokens=max(most, tuning.prefill_tokens),
        chunk_sizer=sizer,
        kv_budget=kv_budget(facts, settings.memory, settings.prefix_cache_bytes),
        prefix_cache=_prefix_cache(facts, tuning, share, settings.disk),
        whole_media=facts.whole_media,
        depth_cost=tuning.depth_cost,
        speculation=_speculation(facts),
        spec_prefill=facts.spec_prefill,
        shared_passes=facts.calibration if facts.calibration is not None and facts.calibration.together else None,
    )


def _speculation(facts: GenerationFacts) -> SpeculationDepth | None:
    if not facts.drafters:
        return None
    costs = StepCosts()
    if (measured := facts.calibration) is not None:
        costs = StepCosts(steps=measured.steps, verifying=measured.verifying)
    return SpeculationDepth(facts.drafters, costs, widest=facts.widest_pass)


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
        return BlockPrefixCache(index, tier, share_tokens=facts.share_tokens)

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


def limit_context(facts: GenerationFacts, memory: int | None, prefix_cache_bytes: int | None) -> GenerationFacts:
    """The facts with the context that fits into memory if a request has all of it: then every request can end, and one
    that never fits is refused before any work."""
    whole = facts.context_length
    fitting = kv_budget(facts, memory, prefix_cache_bytes).longest_row(whole)
    fitting = max(fitting, min(whole, LEAST_TOKENS))
    if fitting >= whole:
        return facts
    needed = tokens_for_row(whole, facts.kv_layout, facts.windows) * facts.kv_bytes_per_token
    where = "its share of --memory" if memory is not None else "the memory of this device"
    note = (
        f"context cut from {whole} to {fitting} tokens: more do not fit {where}; the whole context needs "
        f"{needed / 2**30:.2f} GiB for its KV cache"
    )
    reason = f"The model's own limit is {whole} tokens, but more than {fitting} do not fit {where}."
    return dataclasses.replace(facts, context_length=fitting, context_reason=reason, notes=(*facts.notes, note))
