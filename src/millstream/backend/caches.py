"""The KV caches of a batch, over mlx-lm's cache classes: rows join and leave between steps.

One row alone runs on its own plain caches, which need no mask and pick the fastest kernels; two or more run on the
merged, left-padded ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_cache

RowCaches = list[Any]
"""One mlx-lm cache a layer, for one row."""


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
    """The arrays to evaluate so that a cache is no longer lazy."""
    found: list[mx.array] = []
    stack: list[Any] = [cache.state for cache in caches]
    while stack:
        item = stack.pop()
        if isinstance(item, mx.array):
            found.append(item)
        elif isinstance(item, list | tuple):
            stack.extend(item)
    return found


class BatchCaches:
    """`layers` is what the model's forward pass takes."""

    def __init__(self) -> None:
        self.layers: list[Any] = []
        self._size = 0

    def join(self, rows: Sequence[RowCaches]) -> None:
        """Append rows. All that join in one step are merged first, so that the batch is copied once."""
        if not rows:
            return
        if self._size <= 1:
            alone = [self.layers] if self._size else []
            everyone = [*alone, *rows]
            self.layers = everyone[0] if len(everyone) == 1 else _merge(everyone)
        else:
            for layer, joining in zip(self.layers, _merge(rows), strict=True):
                layer.extend(joining)
        self._size += len(rows)

    def keep(self, places: list[int]) -> None:
        """The batch now consists of its rows at `places`, in that order."""
        if self._size > 1:
            if not places:
                self.layers = []
            elif len(places) == 1:
                self.layers = [layer.extract(places[0]) for layer in self.layers]
            else:
                chosen = mx.array(places, dtype=mx.int32)
                for layer in self.layers:
                    layer.filter(chosen)
        elif not places:
            self.layers = []
        self._size = len(places)


def _merge(rows: Sequence[RowCaches]) -> list[Any]:
    return [type(layer[0]).merge(list(layer)) for layer in zip(*rows, strict=True)]
