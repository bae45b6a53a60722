"""The caches of a batch whose layers are of several kinds: full attention, sliding windows, recurrent states.

Each kind has a form in which rows join and leave without copying others: length classes for full attention, rings for
windows, one array per state. A row has the same number in all of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from millstream.backend.generation.caches.batch_caches import RowCaches
from millstream.backend.generation.caches.class_caches import ClassCaches
from millstream.backend.generation.caches.due import Due
from millstream.backend.generation.caches.joining import MixedRows, layer_window, leaf_window
from millstream.backend.generation.caches.row_numbers import RowNumbers
from millstream.backend.generation.caches.state_caches import StateCaches
from millstream.backend.generation.caches.traced_step import Ref, TracedStep
from millstream.backend.generation.caches.widths import SlotPolicy, exact
from millstream.backend.generation.prefix_store.blocks import PrefixStore
from millstream.backend.generation.prefix_store.cache_state import kv_parts, leaf_caches
from millstream.backend.generation.prefix_store.serialize import Layers
from millstream.backend.layers.patch_layers import callers_of
from millstream.engine.prefix_cache.orders import SavePrefix

WIDE_STATE_BYTES = 1 << 20
"""The most bytes of a row's states if passes are wider than their rows: each step writes the states of all."""

KINDS = (KVCache, RotatingKVCache, ArraysCache)
"""The classes that have a form in a batch. Exact classes: a subclass may hold something else."""


def mixed_misfit(model: Any, caches: RowCaches) -> str | None:
    """Why the layers of a model cannot have caches of our own, as far as its code tells."""
    leaves = leaf_caches(caches)
    for leaf in leaves:
        if type(leaf) not in KINDS:
            return f"{type(leaf).__name__} has no slots"
    attending = sum(hasattr(leaf, "keys") for leaf in leaves)
    callers = len(callers_of(model, "scaled_dot_product_attention"))
    return "its layers have attention of their own" if callers < attending else None


class MixedCaches(TracedStep):
    """Owner only. The caches of a batch: see `BatchCaches`.

    `like`: caches of one row that hold a token. `policy`, `width`: see `RowNumbers`. `kernels`: our CUDA kernels read
    and write the slabs.
    """

    def __init__(
        self, like: RowCaches, policy: SlotPolicy = exact, *, width: SlotPolicy | None = None, kernels: bool = False
    ) -> None:
        leaves = leaf_caches(like)
        state_bytes = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, ArraysCache))
        self._numbers = RowNumbers(policy, width if state_bytes <= WIDE_STATE_BYTES else None)
        templates: dict[int, list[tuple[mx.array, ...]]] = {}
        for leaf in leaves:
            if not isinstance(leaf, ArraysCache):
                templates.setdefault(leaf_window(leaf), []).append(kv_parts(leaf))
        self.due = Due()
        self.attending = {
            window: ClassCaches(parts, policy, kernels=kernels, window=window, due=self.due)
            for window, parts in templates.items()
        }
        """By window, 0 for full attention: the caches of layers that attend."""
        self.states = StateCaches([leaf.cache for leaf in leaves if isinstance(leaf, ArraysCache)], self.due)
        self._kinds = [layer_window(leaf) for leaf in leaves]
        attending = {window: iter(caches.layers) for window, caches in self.attending.items()}
        states = iter(self.states.layers)
        self.layers = [_batched(cache, attending, states) for cache in like]

    @property
    def size(self) -> int:
        return self._numbers.size

    def keep_vacant(self, allowed: bool) -> None:
        for caches in self.attending.values():
            caches.keep_vacant(allowed)

    def join(self, rows: Sequence[MixedRows]) -> list[int]:
        """Add rows. Returns their numbers, in order."""
        numbers = self._numbers.take(sum(each.count for each in rows))
        for window, caches in self.attending.items():
            caches.place([each.attending[window] for each in rows], numbers, self._numbers)
        self.states.place([(each.count, each.states) for each in rows], numbers, self.size)
        return numbers

    def filter(self, indices: list[int]) -> list[int]:
        """Drop all other rows. Returns the new order: the previous number of each, -1 for a fresh one."""
        order = self._numbers.keep(indices)
        for caches in self.attending.values():
            caches.rearrange(indices, order, self._numbers)
        self.states.rearrange(order)
        return order

    def save(self, index: int, order: SavePrefix, store: PrefixStore) -> list[mx.array]:
        """Save KV blocks and a checkpoint of a row. Evaluate the arrays it returns at once, as for `ClassCaches`."""
        self.due.send()

        def tokens(start: int, stop: int) -> Layers:
            return self.attending[0].tokens(index, start, stop) if 0 in self.attending else []

        windows = {window: iter(caches.window_row(index)) for window, caches in self.attending.items() if window}
        states = iter(self.states.row(index))
        others = [next(states) if kind is None else next(windows[kind]) for kind in self._kinds if kind != 0]
        return store.save_tokens(order, tokens, others)

    @property
    def nbytes(self) -> int:
        return sum(caches.nbytes for caches in self.attending.values()) + self.states.nbytes

    def lost_writes(self) -> bool:
        return any(caches.lost_writes() for caches in self.attending.values())

    supports_length = True
    """If the modules that read states take such passes: see `layers/state_layers.py`."""

    def begin_step(self, length: int = 1) -> None:
        self.shape = self._numbers.shape(length)
        for caches in self.attending.values():
            caches.begin_step(length, self.shape)
        self.states.begin_step(self.shape)
        self.due.send()

    def end_step(self, counts: Sequence[int] | None = None) -> None:
        for caches in self.attending.values():
            caches.end_step(counts)
        if counts is not None:
            # What vacant rows keep is nothing to anybody: they follow the others, so that fewer states are told apart.
            taken = self._numbers.taken
            most = max((counts[number] for number in taken), default=1)
            counts = [count if number in taken else most for number, count in enumerate(counts)]
        self.states.end_step(counts)

    @property
    def _all(self) -> list[TracedStep]:
        return [*self.attending.values(), self.states]

    def step_key(self) -> Hashable | None:
        keys = tuple(caches.step_key() for caches in self._all)
        return None if None in keys else (self.size, self.shape, keys)

    def step_refs(self) -> list[Ref]:
        return [ref for caches in self._all for ref in caches.step_refs()]

    def result_refs(self) -> list[Ref]:
        return [ref for caches in self._all for ref in caches.result_refs()]

    def forget_step(self) -> None:
        for caches in self._all:
            caches.forget_step()


def _batched(cache: Any, attending: dict[int, Iterator[Any]], states: Iterator[Any]) -> Any:
    """What stands for a cache of one row in the batch."""
    if isinstance(cache, CacheList):
        return CacheList(*(_batched(each, attending, states) for each in cache.caches))
    return next(states) if isinstance(cache, ArraysCache) else next(attending[leaf_window(cache)])
