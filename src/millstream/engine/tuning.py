"""How an engine is set for its device and its share of memory. Pure; figures that decided stand beside it."""

from __future__ import annotations

import dataclasses

from millstream.engine.keeper import Keeper
from millstream.engine.pace import Pace
from millstream.engine.prefix import PrefixIndex
from millstream.engine.scheduler import Scheduler
from millstream.types import ModelFacts

PREFILL = {"cpu": (256, 128, 4), "gpu": (2048, 256, 256)}
"""Prompt tokens a step; and, for one prompt beside running rows, the most and the least. A GPU's step costs the host
much the same for 300 tokens and for 3,000, so prompts share steps, and every new shape costs it milliseconds, so chunks
are of one length. On the CPU a token costs what it costs, and chunks follow the pace of the rows."""

BLOCK = 16
"""Tokens to a block of the beginnings that are kept."""

WORTH_KEEPING = {"cpu": BLOCK, "gpu": 512}
"""Tokens that must be new for them to be kept. A GPU reads some hundred in a few milliseconds, and copies cost it
launches: with all kept, 64 streams of 260 tokens ran at 10,250 tokens/s on the H200, and with none at 12,273."""


def kept_share(facts: ModelFacts, granted: int | None, asked: int) -> int:
    """Bytes for beginnings that are kept: what was asked for, but at most a quarter of what a budget leaves."""
    if not facts.keeps_prefixes or not facts.kv_bytes_per_token:
        return 0
    return asked if granted is None else max(0, min(asked, (granted - facts.weight_bytes) // 4))


def make_scheduler(chunk: int | None, granted: int | None, kept: int, facts: ModelFacts) -> Scheduler:
    budget, most, least = PREFILL["cpu" if facts.device.startswith("cpu") else "gpu"]
    most = chunk or most
    pace = Pace(most=most, least=min(least, most))
    share = kept_share(facts, granted, kept)
    keeper = None
    if share:
        least = WORTH_KEEPING["cpu" if facts.device.startswith("cpu") else "gpu"] // BLOCK
        index = PrefixIndex(block=BLOCK, block_bytes=BLOCK * facts.kv_bytes_per_token, budget=share, least=least)
        keeper = Keeper(index)
    return Scheduler(
        max_rows=facts.max_rows,
        prefill_tokens=max(most, budget),
        pace=pace,
        kv_tokens=facts.tokens_in(None if granted is None else granted - share),
        keeper=keeper,
        whole_media=facts.whole_media,
    )


def bounded(facts: ModelFacts, granted: int | None, kept: int) -> ModelFacts:
    """The facts with the context that fits into memory."""
    tokens = facts.tokens_in(None if granted is None else granted - kept_share(facts, granted, kept))
    if tokens is None or tokens >= facts.context_length:
        return facts
    note = f"context cut from {facts.context_length} to {tokens} tokens: more do not fit its share of --memory"
    return dataclasses.replace(facts, context_length=tokens, notes=(*facts.notes, note))
