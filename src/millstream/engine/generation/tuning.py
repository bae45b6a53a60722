"""How an engine is set for its device and its share of memory. Pure; figures that decided stand beside it."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path

from millstream.engine.generation.chunk_sizer import ChunkSizer
from millstream.engine.generation.scheduler import Scheduler
from millstream.engine.prefix_cache.cache import CheckpointPrefixCache, PrefixCache
from millstream.engine.prefix_cache.disk.folder import StoreBusy
from millstream.engine.prefix_cache.disk.store import DiskStore
from millstream.engine.prefix_cache.disk.tier import DiskTier
from millstream.engine.prefix_cache.index import PrefixIndex
from millstream.types import ModelFacts

log = logging.getLogger(__name__)

PREFILL = {"cpu": (256, 128, 4), "gpu": (2048, 512, 64)}
"""Prompt tokens a step; and, for one prompt beside running rows, the most and the least. A GPU's step costs the host
much the same for 300 tokens and for 3,000, so prompts share steps, and every new shape costs it milliseconds, so there
are few lengths. On the CPU a token costs what it costs."""

FREE_SECONDS = {"cpu": 0.0, "gpu": 0.005}
"""Seconds that a chunk may add to a step of running rows however short that is: to write a chunk of any length down
costs the H200's host 1.5 ms in each of its steps, where four rows of a small model take 1.8."""

FORMAT_VERSION = 1
"""Of what is on disk; another number makes older files foreign, and they are removed."""

BLOCK_TOKENS = {"cpu": 16, "gpu": 64}
"""Tokens to a block of the beginnings that are kept. A GPU reads 64 as quickly as 16, and the index of 8,000 tokens is
made between two steps of running rows: 2 to 3 ms in blocks of 16 on the H200's host."""

INDEX_BYTES = 512
"""What a block costs the index itself, and so the least that it counts for."""

LEAST_CHECKPOINT_TOKENS = 64
"""The same where states are saved, at least: a prompt is cut there, which costs it a pass."""

LEAST_NEW_TOKENS = {"cpu": BLOCK_TOKENS["cpu"], "gpu": 512}
"""Tokens that must be new for them to be kept. A GPU reads some hundred in a few milliseconds, and copies cost it
launches: with all kept, 64 streams of 260 tokens ran at 10,250 tokens/s on the H200, and with none at 12,273."""


def prefix_cache_share(facts: ModelFacts, granted: int | None, asked: int) -> int:
    """Bytes for beginnings that are kept: what was asked for, but at most a quarter of what a budget leaves."""
    if facts.prefix_sizes is None:
        return 0
    return asked if granted is None else max(0, min(asked, (granted - facts.weight_bytes) // 4))


@dataclass(frozen=True, slots=True)
class DiskTierConfig:
    """Where beginnings of prompts are kept on disk, and how many bytes of them."""

    folder: Path
    budget: int


def make_scheduler(
    chunk: int | None, granted: int | None, kept: int, disk: DiskTierConfig | None, facts: ModelFacts
) -> Scheduler:
    budget, most, least = PREFILL[_kind(facts)]
    most = chunk or most
    pace = ChunkSizer(most=most, least=min(least, most), free=FREE_SECONDS[_kind(facts)])
    share = prefix_cache_share(facts, granted, kept)
    return Scheduler(
        max_rows=facts.max_rows,
        prefill_tokens=max(most, budget),
        pace=pace,
        kv_tokens=facts.tokens_in(None if granted is None else granted - share),
        keeper=_keeper(facts, share, disk),
        whole_media=facts.whole_media,
    )


def _kind(facts: ModelFacts) -> str:
    return "cpu" if facts.device.startswith("cpu") else "gpu"


def _keeper(facts: ModelFacts, budget: int, disk: DiskTierConfig | None) -> PrefixCache | None:
    if not budget or facts.prefix_sizes is None:
        return None
    sizes = facts.prefix_sizes
    worth, block = LEAST_NEW_TOKENS[_kind(facts)], BLOCK_TOKENS[_kind(facts)]
    index = PrefixIndex(
        block=block,
        block_bytes=max(INDEX_BYTES, block * sizes.token),
        budget=budget,
        least=(max(worth, LEAST_CHECKPOINT_TOKENS) if sizes.states else worth) // block,
        from_states=bool(sizes.states),
    )
    shelf = None if disk is None else _shelf(facts, disk, block)
    if not sizes.states:
        return PrefixCache(index, shelf)
    return CheckpointPrefixCache(
        index, lambda tokens: INDEX_BYTES + sizes.state(tokens) + tokens % block * sizes.token, shelf
    )


def _shelf(facts: ModelFacts, disk: DiskTierConfig, block: int) -> DiskTier | None:
    """None where the folder cannot be used: the model is served all the same."""
    stamp = f"millstream-blocks-{FORMAT_VERSION} {facts.identity} {block}"
    store = DiskStore(disk.folder, disk.budget, stamp)
    try:
        store.open()
    except StoreBusy:
        log.warning("another server uses %s: beginnings of prompts are kept in memory only", disk.folder)
        return None
    except OSError as error:
        log.warning("%s cannot be used (%s): beginnings of prompts are kept in memory only", disk.folder, error)
        return None
    stats = store.stats()
    log.info("%d files with beginnings of prompts in %s, %.1f MiB", stats.files, disk.folder, stats.bytes / 2**20)
    return DiskTier(store, stamp, block)


def limit_context(facts: ModelFacts, granted: int | None, kept: int) -> ModelFacts:
    """The facts with the context that fits into memory."""
    tokens = facts.tokens_in(None if granted is None else granted - prefix_cache_share(facts, granted, kept))
    if tokens is None or tokens >= facts.context_length:
        return facts
    note = f"context cut from {facts.context_length} to {tokens} tokens: more do not fit its share of --memory"
    return dataclasses.replace(facts, context_length=tokens, notes=(*facts.notes, note))
