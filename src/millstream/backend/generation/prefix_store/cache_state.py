"""What is in a row's caches, leaf by leaf: keys and values that can be cut anywhere, and states that cannot.

A state is saved as its arrays and its numbers, cut to what later steps can still see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, QuantizedKVCache, RotatingKVCache

from millstream.model_facts import PrefixSizes

PLAIN = (KVCache, QuantizedKVCache)
KINDS = (*PLAIN, RotatingKVCache, ArraysCache, ChunkedKVCache)
"""Exactly these can be kept: a subclass may hold something else."""


@dataclass(frozen=True, slots=True)
class SavedState:
    """One leaf at one place. `numbers` is what its class needs to go on besides the arrays."""

    arrays: tuple[mx.array | None, ...]
    numbers: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays if array is not None)


def leaves(caches: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for cache in caches:
        found += leaves(cache.caches) if isinstance(cache, CacheList) else [cache]
    return found


def is_plain(leaf: Any) -> bool:
    return type(leaf) in PLAIN


def parts_of(leaf: Any) -> tuple[mx.array, ...]:
    """What a leaf that can be cut holds of its tokens, in parts: (1, heads, tokens, any)."""
    keys, values = leaf.keys_and_values()
    return (*keys, *values) if isinstance(leaf, QuantizedKVCache) else (keys, values)


def fill(leaf: Any, parts: Sequence[mx.array]) -> None:
    """Put such parts into a fresh leaf. What is packed already is not packed again."""
    if isinstance(leaf, QuantizedKVCache):
        leaf.keys, leaf.values = tuple(parts[:3]), tuple(parts[3:])
        leaf.offset = parts[0].shape[2]
    else:
        leaf.update_and_fetch(*parts)


def prefix_sizes(caches: Sequence[Any]) -> PrefixSizes | None:
    """What it takes to keep a row with such caches, which have read one token. None if a class is not known here."""
    found = leaves(caches)
    if not all(type(leaf) in KINDS for leaf in found):
        return None
    plain = [_growth(leaf)[1] for leaf in found if is_plain(leaf)]
    return PrefixSizes(sum(plain), tuple(_growth(leaf) for leaf in found if not is_plain(leaf)))


def save(leaf: Any) -> SavedState:
    """Copies, so that the buffers they are cut from are free. Still lazy."""
    if isinstance(leaf, ArraysCache):
        return SavedState(tuple(None if array is None else mx.contiguous(array) for array in leaf.cache))
    if leaf.keys is None:
        return SavedState((None, None), (0, 0))
    if isinstance(leaf, ChunkedKVCache):
        keys, values = leaf.keys_and_values()
        extra = max(0, keys.shape[2] - leaf.chunk_size)
        cut = tuple(mx.contiguous(array[..., extra:, :]) for array in (keys, values))
        return SavedState(cut, (leaf.offset, leaf.start_position + extra))
    return SavedState(tuple(_window(leaf, array) for array in (leaf.keys, leaf.values)), (leaf.offset, 0))


def restore(leaf: Any, saved: SavedState) -> None:
    """Put a saved state into a fresh leaf of the same class.

    A cache that assigns to a part of its array changes that Python object, whoever else has it: each leaf gets its own.
    They share the buffer until one of them is written to.
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
    """How many tokens a leaf grows for, and by how many bytes each."""
    if isinstance(leaf, ArraysCache):
        return 1, leaf.nbytes
    if is_plain(leaf):
        return 0, sum(part.nbytes // part.shape[2] for part in parts_of(leaf))
    limit = leaf.chunk_size if isinstance(leaf, ChunkedKVCache) else leaf.max_size
    return limit, (leaf.keys.nbytes + leaf.values.nbytes) // leaf.keys.shape[2]


def _window(leaf: RotatingKVCache, array: mx.array) -> mx.array:
    """The last `max_size` tokens, oldest first."""
    ordered = leaf._temporal_order(array)
    beyond = ordered.shape[2] - leaf.max_size
    return mx.contiguous(leaf._trim(beyond, ordered) if beyond > 0 else ordered)
