"""The caches of a batch, over mlx-lm's cache classes: rows join and leave between steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import mlx.core as mx
from mlx_lm.models import cache as mlx_cache

from millstream.backend.generation.prefix_store.blocks import PrefixStore
from millstream.engine.prefix_cache.orders import SavePrefix

RowCaches = list[Any]
"""One mlx-lm cache a layer, for one row."""

Joining = TypeVar("Joining", contravariant=True)


class BatchCaches(Protocol[Joining]):
    """What a batch runs on. Rows have places; some places may be vacant and run all the same."""

    layers: list[Any]

    @property
    def size(self) -> int:
        """How many rows a forward pass has, vacant ones too."""
        ...

    def join(self, rows: Sequence[Joining]) -> list[int]:
        """Take rows in; their places, in order."""
        ...

    def keep(self, places: list[int]) -> list[int]:
        """Let go of all other rows. Returns the new layout: which place each one was, -1 for a fresh one."""
        ...

    def save(self, place: int, order: SavePrefix, kept: PrefixStore) -> list[mx.array]:
        """Have `kept` hold what `order` says of the row at a place. To be evaluated."""
        ...

    @property
    def nbytes(self) -> int: ...

    def begin_step(self) -> None: ...

    def end_step(self) -> None: ...


def new_row(model: Any) -> RowCaches:
    caches: RowCaches = mlx_cache.make_prompt_cache(model)
    return caches


def unbatchable(caches: Sequence[Any]) -> str | None:
    """Why rows with such caches cannot share a batch: the class that cannot. None if all can."""
    for cache in caches:
        if isinstance(cache, mlx_cache.CacheList):
            reason = unbatchable(cache.caches)
        elif isinstance(cache, mlx_cache.RotatingKVCache) and cache.keep:
            reason = "RotatingKVCache with kept tokens"
        else:
            reason = None if hasattr(cache, "merge") else type(cache).__name__
        if reason is not None:
            return reason
    return None


def states(caches: Sequence[Any]) -> list[mx.array]:
    """The arrays to evaluate so that a cache is no longer lazy, in the layers' order."""
    found: list[mx.array] = []
    stack: list[Any] = [cache.state for cache in reversed(caches)]
    while stack:
        item = stack.pop()
        if isinstance(item, mx.array):
            found.append(item)
        elif isinstance(item, list | tuple):
            stack.extend(reversed(item))
    return found


def bytes_per_token(caches: Sequence[Any]) -> int:
    """What one more token takes in caches that have read something. A window counts like full attention, although it
    stops to grow; a recurrent state does not grow at all."""
    found = 0
    for cache in caches:
        if isinstance(cache, mlx_cache.CacheList):
            found += bytes_per_token(cache.caches)
        elif isinstance(cache, mlx_cache.QuantizedKVCache):
            found += sum(part.nbytes // part.shape[2] for part in (*cache.keys, *cache.values))
        elif isinstance(keys := getattr(cache, "keys", None), mx.array) and keys.ndim == 4:
            found += (keys.nbytes + cache.values.nbytes) // keys.shape[2]
    return found


class MergedCaches:
    """mlx-lm's own batch caches, for every kind that can batch: sliding window, recurrent, hybrid.

    One row alone runs on its own plain caches, which need no mask; two or more run on the merged, left-padded ones.
    """

    def __init__(self) -> None:
        self.layers: list[Any] = []
        self.size = 0

    def join(self, rows: Sequence[RowCaches]) -> list[int]:
        """Append rows. All that join in one step are merged first, so that the batch is copied once."""
        if self.size <= 1:
            alone = [self.layers] if self.size else []
            everyone = [*alone, *rows]
            self.layers = everyone[0] if len(everyone) == 1 else _merge(everyone)
        else:
            for layer, joining in zip(self.layers, _merge(rows), strict=True):
                layer.extend(joining)
        self.size += len(rows)
        return list(range(self.size - len(rows), self.size))

    def keep(self, places: list[int]) -> list[int]:
        """The batch now consists of its rows at `places`, in that order."""
        if not places:
            self.layers = []
        elif self.size > 1 and len(places) == 1:
            self.layers = [layer.extract(places[0]) for layer in self.layers]
        elif self.size > 1:
            chosen = mx.array(places, dtype=mx.int32)
            for layer in self.layers:
                layer.filter(chosen)
        self.size = len(places)
        return places

    def save(self, place: int, order: SavePrefix, kept: PrefixStore) -> list[mx.array]:
        row = [layer.extract(place) for layer in self.layers] if self.size > 1 else self.layers
        return kept.keep_row(order, row)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in states(self.layers)) if self.layers else 0

    def begin_step(self) -> None:
        """Nothing to prepare: these caches keep their own count."""

    def end_step(self) -> None:
        """Nothing to book."""


def _merge(rows: Sequence[RowCaches]) -> list[Any]:
    return [type(layer[0]).merge(list(layer)) for layer in zip(*rows, strict=True)]
