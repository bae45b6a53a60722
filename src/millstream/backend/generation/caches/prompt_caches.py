"""Caches that a prompt is prefilled into, before its row joins the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache, QuantizedKVCache

_GROWING = (KVCache, QuantizedKVCache)


class Padding:
    """Shared by the layers of one left-padded forward pass: the padding of each row, and the mask made from it."""

    def __init__(self, left: Sequence[int]) -> None:
        self.left = mx.array(list(left), dtype=mx.int32)
        self.mask: mx.array | None = None


class PaddedCache(BatchKVCache):  # type: ignore[misc]
    """One layer of a left-padded forward pass. It remembers its mask, so that attention can recognise it."""

    def __init__(self, left_padding: Sequence[int], shared: Padding) -> None:
        super().__init__(list(left_padding))
        self.padding = shared

    def make_mask(self, N: int, return_array: bool = False, **kwargs: Any) -> mx.array:
        mask: mx.array = super().make_mask(N, return_array, **kwargs)
        if kwargs.get("window_size") is None:
            self.padding.mask = mask
        return mask


def preallocate(caches: Sequence[Any], tokens: int) -> None:
    """Have empty KV caches allocate all of a prompt at once: otherwise they grow by copying, chunk after chunk."""
    for cache in caches:
        if type(cache) in _GROWING and cache.keys is None:
            cache.step = max(KVCache.step, -(-tokens // KVCache.step) * KVCache.step)


def reset_growth(caches: Sequence[Any]) -> None:
    """Undo `preallocate` after prefill: from now on the caches grow by one token per step."""
    for cache in caches:
        if type(cache) in _GROWING:
            cache.step = KVCache.step
