"""Caches that a prompt is read into, before its row joins the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache, QuantizedKVCache

_GROWING = (KVCache, QuantizedKVCache)


class Pads:
    """What the layers of one padded pass share: how much padding each row has, and the mask made of it."""

    def __init__(self, pads: Sequence[int]) -> None:
        self.left = mx.array(list(pads), dtype=mx.int32)
        self.mask: mx.array | None = None


class PaddedCache(BatchKVCache):  # type: ignore[misc]
    """One layer of a left-padded pass. Remembers its mask, so that attention can tell it from any other."""

    def __init__(self, pads: Sequence[int], shared: Pads) -> None:
        super().__init__(list(pads))
        self.pads = shared

    def make_mask(self, N: int, return_array: bool = False, **kwargs: Any) -> mx.array:
        mask: mx.array = super().make_mask(N, return_array, **kwargs)
        if kwargs.get("window_size") is None:
            self.pads.mask = mask
        return mask


def make_room(caches: Sequence[Any], tokens: int) -> None:
    """Have plain caches take all of a prompt at once: they would grow by copying, chunk after chunk."""
    for cache in caches:
        if type(cache) in _GROWING and cache.keys is None:
            cache.step = max(KVCache.step, -(-tokens // KVCache.step) * KVCache.step)


def grow_as_usual(caches: Sequence[Any]) -> None:
    """The prompt is read: what follows comes a token at a time."""
    for cache in caches:
        if type(cache) in _GROWING:
            cache.step = KVCache.step
