"""KV cache slots in one rectangle: for models with attention of their own, which must see all rows in one buffer.

Each layer has one buffer (slots, heads, columns, size) per part of its KV cache. All rows write the same column `end`
in a step, so the write of a step is one contiguous update; a row's tokens are the columns from `starts[slot]` to `end`.
A row that joins is written right-justified into a vacant slot, and a row that leaves only vacates its slot. The buffers
are copied when they must grow and when their columns are used up; the copy drops columns that no row needs. Memory is
that of the longest row for each of them: other models have length classes instead (`class_caches.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from millstream.backend.generation.caches.due import Due
from millstream.backend.generation.caches.joining import JoiningRows
from millstream.backend.generation.caches.slabs import Parts
from millstream.backend.generation.caches.widths import SlotPolicy, powers_of_two
from millstream.backend.generation.prefix_store.blocks import PrefixStore
from millstream.engine.prefix_cache.orders import SavePrefix

COLUMN_STEP = 256
"""Columns are allocated in multiples, so that buffers are copied rarely and shapes repeat."""


def fits_slots(caches: Sequence[Any]) -> bool:
    """Whether all caches are plain KV caches. Slots hold full attention only; a subclass may hold something else."""
    return all(type(cache) is KVCache for cache in caches)


class SlotLayer:
    """One layer's view of the slots, with the interface that mlx-lm's attention layers expect of a cache."""

    def __init__(self, slots: SlotCaches) -> None:
        self.slots = slots
        self.parts: list[mx.array] = []

    @property
    def offset(self) -> mx.array:
        """The position of each row's next token."""
        return self.slots.offset

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        if N != 1 or window_size is not None:  # a trial then tries another layout
            raise ValueError("slots decode one token per row, with full attention")
        return self.slots.mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        keys, values = self.write_column((keys, values))
        return keys, values

    def write_column(self, column: Parts) -> Parts:
        """Write the column of this step. Returns the parts that attention reads."""
        self.allocate(column)
        first, end = self.slots.first, self.slots.end
        for part, new in zip(self.parts, column, strict=True):
            part[..., end : end + 1, :] = new
        return tuple(part[..., first : end + 1, :] for part in self.parts)

    def allocate(self, like: Parts) -> None:
        """Allocate buffers for parts like these, unless there are some."""
        self.parts = self.parts or [self.slots.new_buffer(part) for part in like]


class SlotCaches:
    """The caches of a batch. Owner only. `mask_dims`: the dimensions of the model's attention scores."""

    def __init__(self, layer_count: int, policy: SlotPolicy, *, mask_dims: int = 4) -> None:
        self.layers = [SlotLayer(self) for _ in range(layer_count)]
        self.due = Due()
        self._policy = policy
        self._ones = (1,) * (mask_dims - 2)
        self._starts: list[int | None] = []
        """The first column of each slot's row; None for a vacant slot."""
        self._columns = 0
        self.end = 0
        self.first = 0
        """The first column that any row uses."""
        self.mask: mx.array | None = None
        self.starts = self.offset = mx.zeros((0,), dtype=mx.int32)

    @property
    def count(self) -> int:
        """How many slots there are."""
        return len(self._starts)

    @property
    def size(self) -> int:
        """How many rows a forward pass has."""
        return self.count

    def keep_vacant(self, allowed: bool) -> None:
        """The rectangle follows its own rules."""

    def join(self, joining: Sequence[JoiningRows]) -> list[int]:
        """Write the rows into vacant slots. Returns their slots, in order."""
        rows = sum(each.count for each in joining) + sum(start is not None for start in self._starts)
        longest = max(each.columns for each in joining)
        if rows > self.count or longest > self.end or self.end >= self._columns:
            self._rebuild(list(range(self.count)), self.count if rows <= self.count else self._policy(rows), longest)
        vacant = [slot for slot, start in enumerate(self._starts) if start is None]
        slots: list[int] = []
        for each in joining:
            chosen = vacant[len(slots) : len(slots) + each.count]
            self._write(each, chosen)
            slots += chosen
        self._update_starts()
        return slots

    def filter(self, slots: list[int]) -> list[int]:
        """Vacate all other slots. Returns the new layout: the previous index of each slot, -1 for a fresh one."""
        occupied = set(slots)
        self._starts = [start if slot in occupied else None for slot, start in enumerate(self._starts)]
        wanted = self._policy(len(slots)) if slots else 0
        layout = list(range(self.size))
        if self._policy is not powers_of_two or wanted * 4 <= self.count:
            self._rebuild(slots, wanted)
            layout = [*slots, *[-1] * (self.size - len(slots))]
        self._update_starts()
        return layout

    def save(self, slot: int, order: SavePrefix, store: PrefixStore) -> list[mx.array]:
        """Save KV blocks of the row in a slot. Evaluate the arrays it returns at once: a copy that is still lazy would
        make the next step copy all slots."""
        row_start = self._starts[slot]
        assert row_start is not None, "the slot is vacant"
        start = row_start + order.first * order.block
        columns = slice(start, start + len(order.handles) * order.block)
        layers = [
            tuple(part[slot : slot + 1, :, columns] for part in layer.parts) for layer in self.layers if layer.parts
        ]
        return store.save(order.handles, layers, order.export_id)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for layer in self.layers for part in layer.parts)

    supports_length = False
    """All rows write the same column: what one of them does not keep would stand between the tokens of that row."""

    def begin_step(self, length: int = 1) -> None:
        """Ensure there is a next column, and set what all layers share in this step."""
        assert length == 1, "slots decode one token per row"
        if self.end >= self._columns:
            self._rebuild(list(range(self.count)), self.count)
            self._update_starts()
        self.offset = self.end - self.starts
        self.mask = self._mask(self.first, self.end + 1) if self._needs_mask else None
        self.due.send()

    def end_step(self, counts: Sequence[int] | None = None) -> None:
        self.end += 1

    def new_buffer(self, like: mx.array) -> mx.array:
        return mx.zeros((self.count, like.shape[1], self._columns, like.shape[3]), dtype=like.dtype)

    def _update_starts(self) -> None:
        """Update what depends on which rows are here. If all rows start at column 0, vacant slots do as well, and no
        mask is needed."""
        occupied = [start for start in self._starts if start is not None]
        self._needs_mask = any(occupied)
        self.first = min(occupied, default=0)
        vacant = self.end if self._needs_mask else 0
        starts = [vacant if start is None else start for start in self._starts]
        self.starts = mx.array(starts, dtype=mx.int32)

    def _mask(self, first: int, stop: int) -> mx.array:
        visible = mx.arange(first, stop) >= self.starts[:, None]
        return visible.reshape(self.count, *self._ones, stop - first)

    def _write(self, joining: JoiningRows, slots: list[int]) -> None:
        start = self.end - joining.columns
        for slot, padding in zip(slots, joining.left_padding, strict=True):
            self._starts[slot] = start + padding
        if not joining.layers:
            return
        consecutive = slots == list(range(slots[0], slots[0] + len(slots)))
        rows: Any = slice(slots[0], slots[-1] + 1) if consecutive else mx.array(slots, dtype=mx.int32)
        for layer, parts in zip(self.layers, joining.layers, strict=True):
            layer.allocate(parts)
            for part, new in zip(layer.parts, parts, strict=True):
                part[rows, :, start : self.end] = new

    def _rebuild(self, slots: list[int], size: int, min_end: int = 0) -> None:
        """Copy these slots into `size` fresh ones, as far left as the longest row and `min_end` allow."""
        starts = [self._starts[slot] for slot in slots]
        longest = max((self.end - start for start in starts if start is not None), default=0)
        end = max(longest, min_end)
        columns = -(-(end + COLUMN_STEP // 2) // COLUMN_STEP) * COLUMN_STEP if size else 0
        chosen = None if slots == list(range(self.count)) else mx.array(slots, dtype=mx.int32)

        def moved(old: mx.array) -> mx.array:
            used = old[..., self.end - longest : self.end, :]
            new = mx.zeros((size, old.shape[1], columns, old.shape[3]), dtype=old.dtype)
            new[: len(slots), :, end - longest : end] = used if chosen is None else used[chosen]
            return new

        for layer in self.layers:
            layer.parts = [moved(part) for part in layer.parts] if longest else []
        shift = end - self.end
        self._starts = [None if start is None else start + shift for start in starts] + [None] * (size - len(slots))
        self.end, self._columns = end, columns
