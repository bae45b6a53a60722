"""The caches of a batch, over mlx-lm's cache classes: rows join and leave between steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import mlx.core as mx
from mlx_lm.models import cache as mlx_cache

from millstream.backend.generation.caches.due import Due
from millstream.backend.generation.caches.window_masks import remember_windows
from millstream.backend.generation.prefix_store.blocks import PrefixStore
from millstream.engine.prefix_cache.orders import SavePrefix

RowCaches = list[Any]
"""One mlx-lm cache per layer, for one row."""

Joining = TypeVar("Joining", contravariant=True)

_TRIMMABLE = (mlx_cache.KVCache, mlx_cache.QuantizedKVCache)


class BatchCaches(Protocol[Joining]):
    """The caches that a batch decodes on. A row has an index in the batch; vacant indices run too."""

    layers: list[Any]
    due: Due
    """What is sent to the device before the next step: `begin_step` sends it."""

    @property
    def size(self) -> int:
        """How many rows a forward pass has, including vacant ones."""
        ...

    def keep_vacant(self, allowed: bool) -> None:
        """Whether memory that rows leave may stay vacant for others: see `Plan.tight`."""
        ...

    def join(self, rows: Sequence[Joining]) -> list[int]:
        """Add rows. Returns their indices, in order."""
        ...

    def filter(self, indices: list[int]) -> list[int]:
        """Drop all other rows. Returns the new layout: the previous index of each row, -1 for a fresh one."""
        ...

    def save(self, index: int, order: SavePrefix, store: PrefixStore) -> list[mx.array]:
        """Save a prefix of the row at `index`. Evaluate the arrays it returns."""
        ...

    @property
    def nbytes(self) -> int: ...

    @property
    def supports_length(self) -> bool:
        """True if a step may have several tokens per row, of which each row keeps some: see `end_step`."""
        ...

    def begin_step(self, length: int = 1) -> None:
        """Prepare a pass of `length` tokens per row."""
        ...

    def end_step(self, counts: Sequence[int] | None = None) -> None:
        """After the pass: row number i keeps the first `counts[i]` of its new tokens; None: all of them. What it does
        not keep is never read again."""
        ...


def new_row_caches(model: Any) -> RowCaches:
    caches: RowCaches = mlx_cache.make_prompt_cache(model)
    remember_windows(caches)
    return caches


def unbatchable(caches: Sequence[Any]) -> str | None:
    """Returns the first cache class that cannot be batched, or None if all of them can."""
    for cache in caches:
        if isinstance(cache, mlx_cache.CacheList):
            name = unbatchable(cache.caches)
        elif isinstance(cache, mlx_cache.RotatingKVCache) and cache.keep:
            name = "RotatingKVCache with keep > 0"
        else:
            name = None if hasattr(cache, "merge") else type(cache).__name__
        if name is not None:
            return name
    return None


def cache_arrays(caches: Sequence[Any]) -> list[mx.array]:
    """The arrays of the caches, in layer order: once they are evaluated, no cache is lazy."""
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
    """Bytes per token, measured on caches that hold at least one token. A sliding window counts like full attention:
    the budget knows where it stops growing (`GenerationFacts.windows`). A recurrent state does not grow at all."""
    total = 0
    for cache in caches:
        if isinstance(cache, mlx_cache.CacheList):
            total += bytes_per_token(cache.caches)
        elif isinstance(cache, mlx_cache.QuantizedKVCache):
            total += sum(part.nbytes // part.shape[2] for part in (*cache.keys, *cache.values))
        elif isinstance(keys := getattr(cache, "keys", None), mx.array) and keys.ndim == 4:
            total += (keys.nbytes + cache.values.nbytes) // keys.shape[2]
    return total


class MergedCaches:
    """mlx-lm's own batch caches, for every class that can be batched, where ours cannot be used.

    A single row runs on its own unbatched caches, which need no mask; several run on merged, left-padded ones.
    """

    def __init__(self) -> None:
        self.layers: list[Any] = []
        self.due = Due()
        self.size = 0
        self._length = 1

    def keep_vacant(self, allowed: bool) -> None:
        """None of it is ever vacant."""

    def join(self, rows: Sequence[RowCaches]) -> list[int]:
        """Append rows. Those that join in one step are merged first, so that the batch is copied only once."""
        if self.size <= 1:
            all_rows = [*([self.layers] if self.size else []), *rows]
            self.layers = all_rows[0] if len(all_rows) == 1 else _merge(all_rows)
        else:
            for layer, joining in zip(self.layers, _merge(rows), strict=True):
                layer.extend(joining)
        self.size += len(rows)
        return list(range(self.size - len(rows), self.size))

    def filter(self, indices: list[int]) -> list[int]:
        """Reduce the batch to its rows at `indices`, in that order."""
        if not indices:
            self.layers = []
        elif self.size > 1 and len(indices) == 1:
            self.layers = [layer.extract(indices[0]) for layer in self.layers]
        elif self.size > 1:
            chosen = mx.array(indices, dtype=mx.int32)
            for layer in self.layers:
                layer.filter(chosen)
        self.size = len(indices)
        return indices

    def save(self, index: int, order: SavePrefix, store: PrefixStore) -> list[mx.array]:
        return store.save_row(order, self.row(index))

    def row(self, index: int) -> RowCaches:
        """The caches of one row."""
        return [layer.extract(index) for layer in self.layers] if self.size > 1 else self.layers

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in cache_arrays(self.layers)) if self.layers else 0

    @property
    def supports_length(self) -> bool:
        """One row, on caches that can forget their last tokens: a window that has turned cannot."""
        return self.size == 1 and all(type(layer) in _TRIMMABLE for layer in self.layers)

    def begin_step(self, length: int = 1) -> None:
        """These caches track their own offsets."""
        if length > 1 and not self.supports_length:
            raise ValueError("merged KV caches take one token per row")
        self._length = length
        self.due.send()

    def end_step(self, counts: Sequence[int] | None = None) -> None:
        """Trim what the row does not keep."""
        if counts is not None and self._length > counts[0]:
            mlx_cache.trim_prompt_cache(self.layers, self._length - counts[0])


def _merge(rows: Sequence[RowCaches]) -> list[Any]:
    return [type(layer[0]).merge(list(layer)) for layer in zip(*rows, strict=True)]
