"""The caches of a batch whose layers are of several kinds: sliding window and full attention, or recurrent and hybrid.

Layers with full attention grow with their row: they live in length classes, as in a model that has no others. What the
others keep is bounded by a window or constant in size: they run on mlx-lm's own batch caches.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache

from millstream.backend.generation.caches.batch_caches import MergedCaches, RowCaches
from millstream.backend.generation.caches.class_caches import ClassCaches
from millstream.backend.generation.caches.joining import joining_row
from millstream.backend.generation.caches.widths import exact
from millstream.backend.generation.prefix_store.blocks import PrefixStore
from millstream.backend.generation.prefix_store.cache_state import kv_parts, leaf_caches
from millstream.backend.layers.patch_layers import callers_of
from millstream.engine.prefix_cache.orders import SavePrefix


def is_full_attention(leaf: Any) -> bool:
    """Whether a cache is a plain KV cache. A subclass may hold something else."""
    return type(leaf) is KVCache


def mixed_misfit(model: Any, caches: RowCaches) -> str | None:
    """Why length classes cannot hold the layers with full attention of a model, as far as its code tells."""
    leaves = leaf_caches(caches)
    if not any(is_full_attention(leaf) for leaf in leaves):
        return "no other cache is"
    attending = sum(hasattr(leaf, "keys") for leaf in leaves)
    callers = len(callers_of(model, "scaled_dot_product_attention"))
    if callers > attending:
        return "its layers share keys and values"
    return "its layers have attention of their own" if callers < attending else None


class MixedCaches:
    """Owner only. The caches of a batch: see `BatchCaches`. A row has the same index in both kinds.

    `like`: caches of one row that hold a token. `kernels`: our CUDA kernels read and write the slabs.
    """

    def __init__(self, like: RowCaches, *, kernels: bool = False) -> None:
        self._like = like
        templates = [kv_parts(leaf) for leaf in leaf_caches(like) if is_full_attention(leaf)]
        self.full = ClassCaches(templates, exact, kernels=kernels)
        self._others = MergedCaches()
        self.layers: list[Any] = []

    @property
    def size(self) -> int:
        return self._others.size

    def join(self, rows: Sequence[RowCaches]) -> list[int]:
        """Append rows. Only what is bounded in size is copied."""
        leaves = [leaf_caches(row) for row in rows]
        self.full.join([joining_row([leaf for leaf in row if is_full_attention(leaf)]) for row in leaves])
        indices = self._others.join([[leaf for leaf in row if not is_full_attention(leaf)] for row in leaves])
        self._arrange()
        return indices

    def filter(self, indices: list[int]) -> list[int]:
        """Reduce the batch to its rows at `indices`, in that order."""
        self.full.filter(indices)
        self._others.filter(indices)
        self._arrange()
        return indices

    def save(self, index: int, order: SavePrefix, store: PrefixStore) -> list[mx.array]:
        """Save KV blocks and a checkpoint of a row. Evaluate the arrays it returns at once, as for `ClassCaches`."""
        return store.save_tokens(order, functools.partial(self.full.tokens, index), self._others.row(index))

    @property
    def nbytes(self) -> int:
        return self.full.nbytes + self._others.nbytes

    def begin_step(self) -> None:
        self.full.begin_step()

    def end_step(self) -> None:
        self.full.end_step()

    def _arrange(self) -> None:
        """Give the model its layers in their order."""
        full, others = iter(self.full.layers), iter(self._others.layers)
        self.layers = [_batched(cache, full, others) for cache in self._like] if self.size else []


def _batched(cache: Any, full: Iterator[Any], others: Iterator[Any]) -> Any:
    """What stands for a cache of one row in the batch."""
    if isinstance(cache, CacheList):
        return CacheList(*(_batched(each, full, others) for each in cache.caches))
    return next(full if is_full_attention(cache) else others)
