"""Key-value slots: rows join and leave a batch without copying it.

Each layer has one buffer (slots, heads, columns, size). All rows write the same column `end` in a step, so a step's
write is one contiguous update; a row's own tokens are the columns `left[slot]` to `end`. A row that joins is written
right-justified into a vacant slot, and one that leaves only vacates it. The buffers are copied when they must grow,
and when the columns are used up: then whatever no living row needs is left behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from millstream.backend.kept_blocks import KeptBlocks
from millstream.backend.parcels import Layers
from millstream.engine.backend import Keep

STEP = 256
"""Columns are allotted in steps, so that buffers are copied rarely and shapes repeat."""

SlotPolicy = Callable[[int], int]
"""How many slots to keep for so many rows."""

FULL = 64


def exact(rows: int) -> int:
    """For the CPU, where a vacant row costs as much as a living one."""
    return rows


def powers_of_two(rows: int) -> int:
    """For GPUs, where vacant rows are almost free and new shapes are not."""
    return 1 << max(0, rows - 1).bit_length()


def full_width(slots: int) -> int:
    """How many rows a forward pass gets on CUDA, whose products of 2 to 32 rows take longer than those of 64 (H200: a
    step of 5.1 ms against 4.0). Rows beyond the slots have no keys and values, so they cost no memory."""
    return FULL if 1 < slots < FULL else slots


@dataclass(frozen=True, slots=True)
class Block:
    """Rows that join together: a key and a value buffer a layer, right-justified, `pads[row]` columns of padding."""

    keys: list[mx.array]
    values: list[mx.array]
    pads: tuple[int, ...]

    @property
    def columns(self) -> int:
        return self.keys[0].shape[2] if self.keys else 0

    @property
    def rows(self) -> int:
        return len(self.pads)


def block_of(caches: Sequence[Any]) -> Block:
    """One row that was read into plain caches of its own."""
    if caches[0].keys is None:
        return Block([], [], (0,))
    pairs = [cache.keys_and_values() for cache in caches]
    return Block([keys for keys, _ in pairs], [values for _, values in pairs], (0,))


def all_plain(caches: Sequence[Any]) -> bool:
    """Slots hold full attention only; a subclass may keep something else."""
    return all(type(cache) is KVCache for cache in caches)


class SlotLayer:
    """One layer's view of the slots, as mlx-lm's attention layers expect a cache to be."""

    def __init__(self, slots: SlotCaches) -> None:
        self.slots = slots
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    @property
    def offset(self) -> mx.array:
        """The position of each row's next token."""
        return self.slots.offset

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        assert N == 1 and window_size is None, "slots decode one token a row, over full attention"
        return self.slots.mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        end = self.slots.end
        if self.keys is None or self.values is None:
            self.keys = self.slots.blank(keys)
            self.values = self.slots.blank(values)
        count = self.slots.count
        self.keys[..., end : end + 1, :] = keys[:count]
        self.values[..., end : end + 1, :] = values[:count]
        if self.slots.ragged:
            return self.keys, self.values
        first = self.slots.first
        return self.keys[..., first : end + 1, :], self.values[..., first : end + 1, :]


class SlotCaches:
    """The caches of a batch. Owner only. `wide`: the layers call our attention, so a pass may have more rows than
    there are slots, and unequal rows need no mask."""

    def __init__(self, layer_count: int, policy: SlotPolicy, *, wide: bool) -> None:
        self.layers = [SlotLayer(self) for _ in range(layer_count)]
        self._policy = policy
        self._wide = wide
        self._lefts: list[int | None] = []
        """The first column of each slot's row; None for a vacant slot."""
        self._columns = 0
        self.end = 0
        self.first = 0
        self.ragged = False
        self.mask: mx.array | None = None
        self.left = self.offset = self.end_array = mx.zeros((0,), dtype=mx.int32)

    @property
    def count(self) -> int:
        """How many slots there are."""
        return len(self._lefts)

    @property
    def size(self) -> int:
        """How many rows a forward pass has."""
        return full_width(self.count) if self._wide else self.count

    def join(self, blocks: Sequence[Block]) -> list[int]:
        """Put the rows into vacant slots; their places, in order."""
        rows = sum(block.rows for block in blocks) + sum(left is not None for left in self._lefts)
        longest = max(block.columns for block in blocks)
        if rows > self.count or longest > self.end or self.end >= self._columns:
            self._rebuild(list(range(self.count)), self.count if rows <= self.count else self._policy(rows), longest)
        vacant = [place for place, left in enumerate(self._lefts) if left is None]
        places: list[int] = []
        for block in blocks:
            chosen = vacant[len(places) : len(places) + block.rows]
            self._write(block, chosen)
            places += chosen
        self._settle()
        return places

    def keep(self, places: list[int]) -> list[int]:
        """Vacate all other slots. Returns the new layout: which slot each one was, -1 for a fresh one."""
        living = set(places)
        self._lefts = [left if place in living else None for place, left in enumerate(self._lefts)]
        wanted = self._policy(len(places)) if places else 0
        layout = list(range(self.size))
        if self._policy is exact or wanted * 4 <= self.count:
            self._rebuild(places, wanted)
            layout = [*places, *[-1] * (self.size - len(places))]
        self._settle()
        return layout

    def save(self, place: int, order: Keep, kept: KeptBlocks) -> list[mx.array]:
        """Have `kept` hold blocks of the row in a slot. To be evaluated at once: a copy that is still lazy would make
        the next step copy all slots."""
        left = self._lefts[place]
        assert left is not None, "a vacant slot holds nothing"
        start = left + order.first * order.block
        columns = slice(start, start + len(order.handles) * order.block)
        cut: Layers = [
            (layer.keys[place : place + 1, :, columns], layer.values[place : place + 1, :, columns])
            for layer in self.layers
            if layer.keys is not None and layer.values is not None
        ]
        return kept.keep(order.handles, cut, order.ticket)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for layer in self.layers for array in (layer.keys, layer.values) if array is not None)

    def begin_step(self) -> None:
        """Make room for the next column, and set what all layers share in this step."""
        if self.end >= self._columns:
            self._rebuild(list(range(self.count)), self.count)
            self._settle()
        self.end_array = mx.array([self.end], dtype=mx.int32)
        self.offset = self.end_array - self.left
        self.mask = self._mask(self.first, self.end + 1) if self._uneven and not self.ragged else None

    def end_step(self) -> None:
        self.end += 1

    def whole_mask(self) -> mx.array:
        """For layers that got whole buffers and cannot use the kernel."""
        return self._mask(0, self._columns) & (mx.arange(self._columns) <= self.end)

    def blank(self, like: mx.array) -> mx.array:
        return mx.zeros((self.count, like.shape[1], self._columns, like.shape[3]), dtype=like.dtype)

    def _settle(self) -> None:
        """What depends on who is here. Rows that all begin at column 0 need no mask, and vacant ones join them."""
        living = [left for left in self._lefts if left is not None]
        self._uneven = any(living)
        self.ragged = self._wide and (self._uneven or self.size > self.count)
        self.first = min(living, default=0)
        vacant = self.end if self._uneven else 0
        lefts = [vacant if left is None else left for left in self._lefts]
        self.left = mx.array([*lefts, *[vacant] * (self.size - self.count)], dtype=mx.int32)

    def _mask(self, first: int, beyond: int) -> mx.array:
        return (mx.arange(first, beyond) >= self.left[: self.count, None])[:, None, None, :]

    def _write(self, block: Block, places: list[int]) -> None:
        start = self.end - block.columns
        for place, pad in zip(places, block.pads, strict=True):
            self._lefts[place] = start + pad
        if not block.keys:
            return
        run = places == list(range(places[0], places[0] + len(places)))
        rows: Any = slice(places[0], places[-1] + 1) if run else mx.array(places, dtype=mx.int32)
        for layer, keys, values in zip(self.layers, block.keys, block.values, strict=True):
            if layer.keys is None or layer.values is None:
                layer.keys, layer.values = self.blank(keys), self.blank(values)
            layer.keys[rows, :, start : self.end] = keys
            layer.values[rows, :, start : self.end] = values

    def _rebuild(self, places: list[int], size: int, room_for: int = 0) -> None:
        """Copy the slots at `places` into `size` fresh ones, as far left as the longest row or `room_for` allow."""
        lefts = [self._lefts[place] for place in places]
        longest = max((self.end - left for left in lefts if left is not None), default=0)
        end = max(longest, room_for)
        columns = -(-(end + STEP // 2) // STEP) * STEP if size else 0
        chosen = None if places == list(range(self.count)) else mx.array(places, dtype=mx.int32)

        def moved(old: mx.array | None) -> mx.array | None:
            if old is None or not longest:
                return None
            kept = old[..., self.end - longest : self.end, :]
            new = mx.zeros((size, old.shape[1], columns, old.shape[3]), dtype=old.dtype)
            new[: len(places), :, end - longest : end] = kept if chosen is None else kept[chosen]
            return new

        for layer in self.layers:
            layer.keys, layer.values = moved(layer.keys), moved(layer.values)
        shift = end - self.end
        self._lefts = [None if left is None else left + shift for left in lefts] + [None] * (size - len(places))
        self.end, self._columns = end, columns
