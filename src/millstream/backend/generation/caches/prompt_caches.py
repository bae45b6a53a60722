"""Caches that a prompt is prefilled into, before its row joins the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import ArraysCache, BatchKVCache, KVCache, QuantizedKVCache, RotatingKVCache

from millstream.backend.generation.prefix_store.cache_state import leaf_caches

_GROWING = (KVCache, QuantizedKVCache)


class Padding:
    """Shared by the layers of one left-padded forward pass: the padding of each row, where it begins, and the mask made
    from it."""

    def __init__(self, left: Sequence[int]) -> None:
        self.left = mx.array(list(left), dtype=mx.int32)
        self.offset = mx.array([-padding for padding in left], dtype=mx.int32)
        self.mask: mx.array | None = None


class PaddedCache(BatchKVCache):  # type: ignore[misc]
    """One layer of a left-padded forward pass. It remembers its mask, so that attention can recognise it."""

    def __init__(self, shared: Padding) -> None:
        # Not by mlx-lm: arrays of its own for each layer would cost the host more than the layer's graph.
        self.keys: Any = None
        self.values: Any = None
        self._right_padding = None
        self.left_padding, self.offset, self._idx = shared.left, shared.offset, 0
        self.padding = shared

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """One pass is all that this cache holds, so there is no room to grow. What it holds is contiguous: rows that
        join are written from it as it is."""
        if self.keys is not None:
            raise ValueError("a padded cache takes one pass")
        self.keys, self.values = mx.contiguous(keys), mx.contiguous(values)
        self._idx = keys.shape[2]
        self.offset = self.offset + self._idx
        return self.keys, self.values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        return self.keys, self.values

    def make_mask(self, N: int, return_array: bool = False, **kwargs: Any) -> mx.array:
        mask: mx.array = super().make_mask(N, return_array, **kwargs)
        if kwargs.get("window_size") is None:
            self.padding.mask = mask
        return mask


class PaddedPackedCache:
    """One layer of a left-padded forward pass of a quantised KV cache, into empty caches: attention reads what is
    packed, as it does in prompts that are prefilled alone."""

    def __init__(self, shared: Padding, *, bits: int, group_size: int) -> None:
        self.padding = shared
        self.bits, self.group_size = bits, group_size
        self.offset = shared.offset
        self.parts: tuple[mx.array, ...] = ()

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        if self.padding.mask is None:
            self.padding.mask = create_causal_mask(N, left_padding=self.padding.left)
        return self.padding.mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        packed = [mx.quantize(each, group_size=self.group_size, bits=self.bits) for each in (keys, values)]
        self.parts = tuple(part for parts in packed for part in parts)
        return self.parts[:3], self.parts[3:]


def repeat_row(caches: Sequence[Any], rows: int) -> None:
    """Have caches that hold one row hold it so many times. Copies are made by what writes to them next."""
    for leaf in leaf_caches(caches):
        if isinstance(leaf, ArraysCache):
            leaf.cache = [None if array is None else _repeated(array, rows) for array in leaf.cache]
        elif leaf.keys is not None:
            leaf.keys, leaf.values = _repeated(leaf.keys, rows), _repeated(leaf.values, rows)


def _repeated(array: mx.array, rows: int) -> mx.array:
    return mx.broadcast_to(array, (rows, *array.shape[1:]))


def begin_right_padding(caches: Sequence[Any], lengths: Sequence[int], columns: int) -> None:
    """Prepare the caches of some rows for a pass of so many columns, in which rows have these lengths."""
    shared = mx.array(list(lengths))  # each cache takes a copy of its own, on the device
    for leaf in leaf_caches(caches):
        if isinstance(leaf, ArraysCache):
            leaf.prepare(lengths=shared)
        elif type(leaf) is KVCache and leaf.keys is None and len(lengths) > 1:
            leaf.step = columns


def end_right_padding(caches: Sequence[Any], padding: int = 0) -> None:
    """After the pass. `padding`: columns that all rows had too many."""
    for leaf in leaf_caches(caches):
        if isinstance(leaf, ArraysCache):
            leaf.finalize()
        elif isinstance(leaf, RotatingKVCache) and padding:
            # Its own `trim` would take the rest for a rotated buffer.
            leaf.keys, leaf.values = leaf.keys[..., :-padding, :], leaf.values[..., :-padding, :]
            leaf.offset, leaf._idx = leaf.offset - padding, leaf.keys.shape[2]
        elif padding:
            leaf.trim(padding)


def preallocate(caches: Sequence[Any], tokens: int) -> None:
    """Have empty KV caches allocate all of a prompt at once: otherwise they grow by copying, chunk after chunk."""
    for cache in leaf_caches(caches):
        if type(cache) in _GROWING and cache.keys is None:
            cache.step = max(KVCache.step, -(-tokens // KVCache.step) * KVCache.step)


def reset_growth(caches: Sequence[Any]) -> None:
    """Undo `preallocate` after prefill: from now on the caches grow by one token per step."""
    for cache in leaf_caches(caches):
        if type(cache) in _GROWING:
            cache.step = KVCache.step
