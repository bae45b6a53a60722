"""Key-value slots: rows join and leave a batch without copying it.

Each layer has a buffer (slots, heads, columns, size) for every part of what it keeps. All rows write the same column
`end` in a step, so a step's write is one contiguous update; a row's own tokens are the columns `left[slot]` to `end`. A
row that joins is written right-justified into a vacant slot, and one that leaves only vacates it. The buffers are
copied when they must grow, and when the columns are used up: then whatever no living row needs is left behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from millstream.backend.generation.caches.widths import SlotPolicy, exact
from millstream.backend.generation.prefix_store.blocks import PrefixStore
from millstream.engine.generation.backend import SavePrefix

STEP = 256
"""Columns are allotted in steps, so that buffers are copied rarely and shapes repeat."""

Place = Callable[[mx.array, mx.array, Sequence[int], int], mx.array]
"""Writes rows into a buffer at these slots, from this column on, in place; what it gives is to be evaluated."""

Parts = tuple[mx.array, ...]
"""What a layer keeps, tokens on axis 2: keys and values; quantised, the packed numbers, scales and biases of each."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows that join together: their parts, layer by layer, right-justified, `pads[row]` columns of padding."""

    layers: list[Parts]
    pads: tuple[int, ...]

    @property
    def columns(self) -> int:
        return self.layers[0][0].shape[2] if self.layers else 0

    @property
    def arrays(self) -> list[mx.array]:
        return [part for parts in self.layers for part in parts]

    @property
    def rows(self) -> int:
        return len(self.pads)


def block_of(caches: Sequence[Any]) -> Block:
    """One row that was read into caches of its own."""
    return Block([parts_of(cache) for cache in caches] if caches[0].keys is not None else [], (0,))


def parts_of(cache: Any) -> Parts:
    keys, values = cache.keys_and_values()
    return (keys, values) if isinstance(keys, mx.array) else (*keys, *values)


def all_plain(caches: Sequence[Any]) -> bool:
    """Slots hold full attention only; a subclass may keep something else."""
    return all(type(cache) is KVCache for cache in caches)


class SlotLayer:
    """One layer's view of the slots, as mlx-lm's attention layers expect a cache to be."""

    def __init__(self, slots: SlotCaches) -> None:
        self.slots = slots
        self.parts: list[mx.array] = []
        self._new: Parts | None = None

    @property
    def offset(self) -> mx.array:
        """The position of each row's next token."""
        return self.slots.offset

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        assert N == 1 and window_size is None, "slots decode one token a row, over full attention"
        return self.slots.mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        if self.slots.late:
            self.provide((keys, values))
            self._new = (keys, values)
            return keys, values
        keys, values = self.put((keys, values))
        return keys, values

    def take_new(self) -> Parts | None:
        """The step's column, if attention is to write it."""
        new, self._new = self._new, None
        return new

    def put(self, column: Parts) -> Parts:
        """Write a step's column of every part; what attention reads of each."""
        self.provide(column)
        count, first, end = self.slots.count, self.slots.first, self.slots.end
        for part, new in zip(self.parts, column, strict=True):
            part[..., end : end + 1, :] = new[:count]
        return tuple(part if self.slots.ragged else part[..., first : end + 1, :] for part in self.parts)

    def provide(self, like: Parts) -> None:
        """Have buffers for such parts."""
        self.parts = self.parts or [self.slots.blank(part) for part in like]


class SlotCaches:
    """The caches of a batch. Owner only. With a `width` the layers call our attention, so a pass has that many rows
    for so many slots, unequal rows need no mask, and a step's column is written by attention. With a `place`, rows that
    join are written in place. `mask_dims`: as many as the scores of the model's attention have."""

    def __init__(
        self,
        layer_count: int,
        policy: SlotPolicy,
        *,
        width: SlotPolicy | None = None,
        place: Place | None = None,
        mask_dims: int = 4,
        layer: Callable[[SlotCaches], SlotLayer] = SlotLayer,
    ) -> None:
        self.layers = [layer(self) for _ in range(layer_count)]
        self._policy = policy
        self._width = width
        self._place = place
        self._ones = (1,) * (mask_dims - 2)
        self._lefts: list[int | None] = []
        """The first column of each slot's row; None for a vacant slot."""
        self._columns = 0
        self.end = 0
        self.first = 0
        self.ragged = False
        self.mask: mx.array | None = None
        self.left = self.offset = self.end_array = mx.zeros((0,), dtype=mx.int32)

    @property
    def late(self) -> bool:
        """Whether attention writes a step's column."""
        return self._width is not None

    @property
    def count(self) -> int:
        """How many slots there are."""
        return len(self._lefts)

    @property
    def size(self) -> int:
        """How many rows a forward pass has."""
        return self.count if self._width is None else self._width(self.count)

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

    def save(self, place: int, order: SavePrefix, kept: PrefixStore) -> list[mx.array]:
        """Have `kept` hold blocks of the row in a slot. To be evaluated at once: a copy that is still lazy would make
        the next step copy all slots."""
        left = self._lefts[place]
        assert left is not None, "a vacant slot holds nothing"
        start = left + order.first * order.block
        columns = slice(start, start + len(order.handles) * order.block)
        cut = [
            tuple(self._apart(part[place : place + 1, :, columns]) for part in layer.parts)
            for layer in self.layers
            if layer.parts
        ]
        return kept.keep(order.handles, cut, order.ticket)

    def _apart(self, part: mx.array) -> mx.array:
        """Copied for sure, if slots are written in place: `contiguous` shares memory where it is nearly all needed."""
        return part if self._place is None else part * 1

    def lost_writes(self) -> bool:
        """True if a column that a row has written is still zero in all buffers: a kernel wrote it to a copy. The last
        column is not looked at, since its step may be under way."""
        parts = [part for layer in self.layers for part in layer.parts]
        for place, left in enumerate(self._lefts):
            if left is not None and left < self.end - 1:
                filled = [mx.any(part[place, :, left : self.end - 1] != 0, axis=(0, 2)) for part in parts]
                if not mx.all(mx.any(mx.stack(filled), axis=0)).item():
                    return True
        return False

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for layer in self.layers for part in layer.parts)

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
        self.ragged = self._width is not None and (self._uneven or self.size > self.count)
        self.first = min(living, default=0)
        vacant = self.end if self._uneven else 0
        lefts = [vacant if left is None else left for left in self._lefts]
        self.left = mx.array([*lefts, *[vacant] * (self.size - self.count)], dtype=mx.int32)

    def _mask(self, first: int, beyond: int) -> mx.array:
        seen = mx.arange(first, beyond) >= self.left[: self.count, None]
        return seen.reshape(self.count, *self._ones, beyond - first)

    def _write(self, block: Block, places: list[int]) -> None:
        start = self.end - block.columns
        for place, pad in zip(places, block.pads, strict=True):
            self._lefts[place] = start + pad
        if not block.layers:
            return
        if self._place is not None:
            written = []
            for layer, parts in zip(self.layers, block.layers, strict=True):
                layer.provide(parts)
                written += [self._place(part, new, places, start) for part, new in zip(layer.parts, parts, strict=True)]
            mx.async_eval(written)  # type: ignore[no-untyped-call]
            return
        run = places == list(range(places[0], places[0] + len(places)))
        rows: Any = slice(places[0], places[-1] + 1) if run else mx.array(places, dtype=mx.int32)
        for layer, parts in zip(self.layers, block.layers, strict=True):
            layer.provide(parts)
            for part, new in zip(layer.parts, parts, strict=True):
                part[rows, :, start : self.end] = new

    def _rebuild(self, places: list[int], size: int, room_for: int = 0) -> None:
        """Copy the slots at `places` into `size` fresh ones, as far left as the longest row or `room_for` allow."""
        lefts = [self._lefts[place] for place in places]
        longest = max((self.end - left for left in lefts if left is not None), default=0)
        end = max(longest, room_for)
        columns = -(-(end + STEP // 2) // STEP) * STEP if size else 0
        chosen = None if places == list(range(self.count)) else mx.array(places, dtype=mx.int32)

        def moved(old: mx.array) -> mx.array:
            kept = old[..., self.end - longest : self.end, :]
            new = mx.zeros((size, old.shape[1], columns, old.shape[3]), dtype=old.dtype)
            new[: len(places), :, end - longest : end] = kept if chosen is None else kept[chosen]
            return new

        for layer in self.layers:
            layer.parts = [moved(part) for part in layer.parts] if longest else []
        shift = end - self.end
        self._lefts = [None if left is None else left + shift for left in lefts] + [None] * (size - len(places))
        self.end, self._columns = end, columns
