"""The KV caches of a batch in arenas: rows join and leave, and each step is a pass of one column or of a few."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from millstream.backend.generation.arena.rows import Rows
from millstream.backend.generation.caches.due import Due
from millstream.backend.generation.prefix_store.blocks import PrefixStore
from millstream.engine.prefix_cache.orders import SavePrefix

MOST_VACANT = 8
"""Rows that have left may stay as long as they are at most one of so many: the next step leaves them out."""


@dataclass(frozen=True, slots=True)
class Joining:
    """Prompts that have been read, among the rows of their pass."""

    rows: Rows
    chosen: list[int]


class ArenaCaches:
    """Owner only. See `BatchCaches`."""

    def __init__(self, rows: Rows) -> None:
        """`rows`: none yet."""
        self._rows = rows
        self._vacant: set[int] = set()
        self.due = Due()
        self.layers = rows.layers

    @property
    def size(self) -> int:
        return self._rows.size

    def keep_vacant(self, allowed: bool) -> None:
        """Few rows are vacant in any case."""

    def join(self, rows: Sequence[Joining]) -> list[int]:
        found: list[int] = []
        for each in rows:
            each.rows.close_gaps()
            found += self._rows.join(each.rows, each.chosen)
        return found

    def filter(self, indices: list[int]) -> list[int]:
        size, kept = self.size, set(indices)
        if not indices:
            self._rows = self._rows.empty()
            self._vacant, self.layers = set(), self._rows.layers
            return []
        gone = set(range(size)) - kept
        if MOST_VACANT * len(gone) > size:
            self._rows.take(indices)
            self._vacant = set()
            return indices
        for row in gone - self._vacant:
            self._rows.forget(row)
        self._vacant = gone
        return list(range(size))

    def save(self, index: int, order: SavePrefix, store: PrefixStore) -> list[mx.array]:
        return self._rows.save(index, order, store)

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes

    supports_length = True
    """If the modules that read states take such passes: see `layers/state_layers.py`."""

    def begin_step(self, length: int = 1) -> None:
        self.due.send()
        self._rows.begin_some(length)

    def end_step(self, counts: Sequence[int] | None = None) -> None:
        self._rows.end(counts)
        if counts is not None:
            self._rows.close_gaps()
        states = (array for each in self._rows.states for array in each.arrays)
        self.due.with_step(*self._rows.marks, *states)
