"""The state of a row's caches, per leaf cache: KV caches that can be sliced at any token, and states that cannot.

A state is saved as its arrays and integers, cut to the tokens that later steps can still attend to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, QuantizedKVCache, RotatingKVCache

from millstream.model_facts import PrefixSizes

SLICEABLE = (KVCache, QuantizedKVCache)
SUPPORTED = (*SLICEABLE, RotatingKVCache, ArraysCache, ChunkedKVCache)
"""Cache classes that can be saved. Exact classes: a subclass may hold something else."""


@dataclass(frozen=True, slots=True)
class SavedState:
    """One leaf cache after some token. `numbers` holds the integers that its class needs besides the arrays."""

    arrays: tuple[mx.array | None, ...]
    numbers: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays if array is not None)


def leaf_caches(caches: Sequence[Any]) -> list[Any]:
    """Flatten nested `CacheList`s."""
    found: list[Any] = []
    for cache in caches:
        found += leaf_caches(cache.caches) if isinstance(cache, CacheList) else [cache]
    return found


def is_sliceable(leaf: Any) -> bool:
    return type(leaf) in SLICEABLE


def kv_parts(cache: Any) -> tuple[mx.array, ...]:
    """The arrays of a KV cache, each (rows, heads, tokens, any): keys and values, or the packed weights, scales and
    biases of each if it is quantised."""
    keys, values = cache.keys_and_values()
    return (*keys, *values) if isinstance(cache, QuantizedKVCache) else (keys, values)


def fill_cache(leaf: Any, parts: Sequence[mx.array]) -> None:
    """Put `kv_parts` into a fresh cache. Quantised parts are not quantised again."""
    if isinstance(leaf, QuantizedKVCache):
        leaf.keys, leaf.values = tuple(parts[:3]), tuple(parts[3:])
        leaf.offset = parts[0].shape[2]
    else:
        leaf.update_and_fetch(*parts)


def prefix_sizes(caches: Sequence[Any]) -> PrefixSizes | None:
    """How many bytes saving a row takes, measured on caches that hold one token. Returns None if one of the cache
    classes is not supported."""
    found = leaf_caches(caches)
    if not all(type(leaf) in SUPPORTED for leaf in found):
        return None
    sliceable = [_growth(leaf)[1] for leaf in found if is_sliceable(leaf)]
    return PrefixSizes(sum(sliceable), tuple(_growth(leaf) for leaf in found if not is_sliceable(leaf)))


def save_state(leaf: Any) -> SavedState:
    """Copy the state of a cache that cannot be sliced, so that its buffers are free. The copies are still lazy."""
    if isinstance(leaf, ArraysCache):
        return SavedState(tuple(None if array is None else mx.contiguous(array) for array in leaf.cache))
    if leaf.keys is None:
        return SavedState((None, None), (0, 0))
    if isinstance(leaf, ChunkedKVCache):
        keys, values = leaf.keys_and_values()
        extra = max(0, keys.shape[2] - leaf.chunk_size)
        trimmed = tuple(mx.contiguous(array[..., extra:, :]) for array in (keys, values))
        return SavedState(trimmed, (leaf.offset, leaf.start_position + extra))
    return SavedState(tuple(_window(leaf, array) for array in (leaf.keys, leaf.values)), (leaf.offset, 0))


def restore_state(leaf: Any, saved: SavedState) -> None:
    """Put a saved state into a fresh cache of the same class.

    Each cache gets array objects of its own: assigning to a slice of an MLX array changes the Python object, for every
    holder of it. The objects share one buffer until one of them is written to.
    """
    own = [None if array is None else mx.contiguous(array) for array in saved.arrays]
    if isinstance(leaf, ArraysCache):
        leaf.cache = own
        return
    leaf.keys, leaf.values = own
    leaf.offset, start = saved.numbers
    if isinstance(leaf, ChunkedKVCache):
        leaf.start_position = start
    elif leaf.keys is not None:
        leaf._idx = leaf.keys.shape[2]


def _growth(leaf: Any) -> tuple[int, int]:
    """For how many tokens a cache grows (0: without limit), and by how many bytes per token."""
    if isinstance(leaf, ArraysCache):
        return 1, leaf.nbytes
    if is_sliceable(leaf):
        return 0, sum(part.nbytes // part.shape[2] for part in kv_parts(leaf))
    limit = leaf.chunk_size if isinstance(leaf, ChunkedKVCache) else leaf.max_size
    return limit, (leaf.keys.nbytes + leaf.values.nbytes) // leaf.keys.shape[2]


def _window(leaf: RotatingKVCache, array: mx.array) -> mx.array:
    """The last `max_size` tokens, oldest first."""
    ordered = leaf._temporal_order(array)
    excess = ordered.shape[2] - leaf.max_size
    return mx.contiguous(leaf._trim(excess, ordered) if excess > 0 else ordered)
