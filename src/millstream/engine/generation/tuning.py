"""Sets up generation for a device and a memory share: chunk lengths, block sizes, the prefix cache and its disk tier.

The measurements that decided the constants stand beside them.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path

from millstream.engine.generation.chunk_sizer import MAX_GAP, ChunkSizer
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

PREFILL = {"cpu": (256, 128, 4), "gpu": (2048, 512, 64)}
"""Prompt tokens per step; and, for one prompt while rows decode, the longest and the shortest chunk. A GPU's step costs
the host much the same for 300 tokens and for 3,000, so prompts share steps, and every new shape costs milliseconds, so
there are few lengths. On the CPU, cost is proportional to tokens."""

LONGEST_CHUNK = {"cpu": 256, "gpu": 8192}
"""The longest chunk while rows decode and prompts wait; `--max-token-gap` bounds the steps that compute it. From the
H200's costs of a step (2.4 ms) and of a token (12.5 us), 8,192 tokens in five steps of at most 28 ms prefill at four
fifths of the pace of a prompt alone. That is computed, not measured."""

FREE_SECONDS = {"cpu": 0.0, "gpu": 0.005}
"""Seconds that a chunk may add to a decode step, however short that is: building the graph of a chunk costs the H200's
host 1.5 ms in each of its steps, where four rows of a small model take 1.8 ms."""

FORMAT_VERSION = 1
"""Of the files on disk; files of another version are removed."""

BLOCK_TOKENS = {"cpu": 16, "gpu": 64}
"""Tokens per KV block of the prefix cache. A GPU prefills 64 as quickly as 16, and the index of 8,000 tokens is built
between two decode steps: 2 to 3 ms in blocks of 16 on the H200's host."""

INDEX_BYTES = 512
"""The memory of a block in the index itself: the least that a block counts for."""

MIN_CHECKPOINT_TOKENS = 64
"""The fewest new tokens that make a checkpoint worth it: a prompt is cut there, which costs a pass."""

MIN_NEW_TOKENS = {"cpu": BLOCK_TOKENS["cpu"], "gpu": 512}
"""The fewest new tokens that are saved. A GPU prefills some hundred in a few milliseconds, and copies cost launches:
with all saved, 64 streams of 260 tokens ran at 10,250 tokens/s on the H200, and with none at 12,273."""


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
    """The longest chunk of one prompt while rows decode. None: see `PREFILL` and `LONGEST_CHUNK`."""
    memory: int | None = None
    """Bytes for weights and caches together. None: no bound."""
    prefix_cache_bytes: int = 0
    disk: DiskTierConfig | None = None
    max_token_gap: float = MAX_GAP
    """Seconds between two tokens of a stream that prefill may cause."""


def make_scheduler(settings: SchedulerSettings, facts: GenerationFacts) -> GenerationScheduler:
    budget, most, least = PREFILL[_device_kind(facts)]
    longest = settings.prefill_chunk or LONGEST_CHUNK[_device_kind(facts)]
    most = settings.prefill_chunk or most
    share = prefix_cache_share(facts, settings.memory, settings.prefix_cache_bytes)
    return GenerationScheduler(
        max_rows=facts.max_rows,
        prefill_tokens=max(most, budget),
        chunk_sizer=ChunkSizer(
            most=most,
            least=min(least, most),
            longest=longest,
            free_seconds=FREE_SECONDS[_device_kind(facts)],
            max_gap=settings.max_token_gap,
        ),
        kv_tokens=facts.tokens_in(None if settings.memory is None else settings.memory - share),
        prefix_cache=_prefix_cache(facts, share, settings.disk),
        whole_media=facts.whole_media,
    )


def _device_kind(facts: GenerationFacts) -> str:
    return "cpu" if facts.device.startswith("cpu") else "gpu"


def _prefix_cache(facts: GenerationFacts, budget: int, disk: DiskTierConfig | None) -> PrefixCache:
    if not budget or facts.prefix_sizes is None:
        return NullPrefixCache()
    sizes = facts.prefix_sizes
    worth, block = MIN_NEW_TOKENS[_device_kind(facts)], BLOCK_TOKENS[_device_kind(facts)]
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
