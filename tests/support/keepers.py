"""Schedulers that keep beginnings of prompts in small blocks, so that short prompts have many."""

from __future__ import annotations

from pathlib import Path

from millstream.engine.disk_store import DiskStore
from millstream.engine.keeper import Keeper, StateKeeper
from millstream.engine.prefix import PrefixIndex
from millstream.engine.scheduler import Scheduler
from millstream.engine.shelf import Shelf
from millstream.types import ModelFacts

BLOCK = 4


def keeping_scheduler(budget: int, disk: Path | None, facts: ModelFacts) -> Scheduler:
    """Every block and every state counts for one byte."""
    assert facts.keeps is not None
    states = bool(facts.keeps.states)
    index = PrefixIndex(block=BLOCK, block_bytes=1, budget=budget, from_states=states)
    shelf = None
    if disk is not None:
        store = DiskStore(disk, 2**30, facts.identity)
        store.open()
        shelf = Shelf(store, facts.identity, BLOCK)
    keeper = StateKeeper(index, lambda tokens: 1, shelf) if states else Keeper(index, shelf)
    return Scheduler(max_rows=facts.max_rows, prefill_tokens=7, keeper=keeper, whole_media=facts.whole_media)
