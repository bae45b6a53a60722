"""The KV caches of Whisper's rows, in slots that rows take and leave. Owner only.

All rows write their next token to the same column, so that a step writes one slice per layer. A row that joins later
has its prompt in the columns just before that; the columns before its first one are masked.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from millstream.backend.transcription.whisper.model import KeysValues

GROWTH = 64
"""Columns that are added at once."""


class RowCache:
    """Slots for rows: the keys and values of their audio and of their text."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.cross: list[KeysValues] = []
        self._own: list[list[mx.array]] = []
        """Keys and values of each layer: (slots, heads, columns, values per head)."""
        self._starts: list[int | None] = []
        """The first column of each slot's row; None for a free slot."""
        self._column = 0
        """The column that the next step writes."""
        self.mask: mx.array | None = None
        self._from = 0

    @property
    def slots(self) -> int:
        return len(self._starts)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for pair in (*self.cross, *self._own) for array in pair)

    def join(self, cross: Sequence[KeysValues], own: Sequence[KeysValues]) -> int:
        """Takes the keys and values of one row, whose arrays have one row each. Returns its slot."""
        slot = self._free_slot(cross)
        for pair, new in zip(self.cross, cross, strict=True):
            for array, row in zip(pair, new, strict=True):
                array[slot] = row[0]
        self.rewind(slot, own)
        return slot

    def rewind(self, slot: int, own: Sequence[KeysValues]) -> None:
        """The row in this slot begins again, with this text before it."""
        length = own[0][0].shape[2]
        if self._column < length:
            self._shift(length - self._column)
        if not self._own:
            self._allocate(own, max(length, self._column))
        self._reserve(self._column)
        begin = self._starts[slot] = self._column - length
        if length:
            for pair, new in zip(self._own, own, strict=True):
                for array, row in zip(pair, new, strict=True):
                    array[slot, :, begin : self._column] = row[0]

    def leave(self, slot: int) -> None:
        self._starts[slot] = None

    def cross_of(self, slot: int) -> list[KeysValues]:
        return [(keys[slot : slot + 1], values[slot : slot + 1]) for keys, values in self.cross]

    def compact(self) -> list[int] | None:
        """Gives up free slots if they are at least half of all. Returns the slots that stay, in their new order, or
        None if nothing has moved."""
        live = [slot for slot, start in enumerate(self._starts) if start is not None]
        if not live:
            self.clear()
            return []
        if 2 * len(live) > self.slots:
            return None
        taken = mx.array(live)
        self.cross = [(keys[taken], values[taken]) for keys, values in self.cross]
        self._own = [[array[taken] for array in pair] for pair in self._own]
        self._starts = [self._starts[slot] for slot in live]
        return live

    def begin_step(self) -> None:
        """Chooses the column of this step and the columns that are seen."""
        starts = [start for start in self._starts if start is not None]
        first = min(starts)
        if first >= GROWTH:
            self._shift(-first)
            first = 0
        self._reserve(self._column + 1)
        self._from = first
        own = np.array([first if start is None else start for start in self._starts])
        if (own == first).all():
            self.mask = None
        else:
            columns = np.arange(first, self._column + 1)
            self.mask = mx.array(columns[None, None, None] >= own[:, None, None, None])

    def append(self, layer: int, keys: mx.array, values: mx.array) -> KeysValues:
        own = self._own[layer]
        for place, new in enumerate((keys, values)):
            own[place][:, :, self._column : self._column + 1] = new
        seen = slice(self._from, self._column + 1)
        return own[0][:, :, seen], own[1][:, :, seen]

    def end_step(self) -> None:
        self._column += 1

    def lengths(self) -> list[int]:
        """The position of each slot's next token; 0 for free ones."""
        return [0 if start is None else self._column - start for start in self._starts]

    def arrays(self) -> list[mx.array]:
        return [array for pair in (*self.cross, *self._own) for array in pair]

    def _free_slot(self, like: Sequence[KeysValues]) -> int:
        for slot, start in enumerate(self._starts):
            if start is None:
                return slot
        more = max(1, self.slots)
        if not self.cross:
            self.cross = [(_empty(keys, more), _empty(values, more)) for keys, values in like]
        else:
            self.cross = [(_with_slots(keys, more), _with_slots(values, more)) for keys, values in self.cross]
            self._own = [[_with_slots(array, more) for array in pair] for pair in self._own]
        self._starts += [None] * more
        return self.slots - more

    def _allocate(self, like: Sequence[KeysValues], columns: int) -> None:
        size = -(-max(columns, 1) // GROWTH) * GROWTH
        self._own = [
            [mx.zeros((self.slots, array.shape[1], size, array.shape[3]), array.dtype) for array in pair]
            for pair in like
        ]

    def _reserve(self, columns: int) -> None:
        missing = columns - self._own[0][0].shape[2]
        if missing > 0:
            more = -(-missing // GROWTH) * GROWTH
            self._own = [[mx.pad(array, [(0, 0), (0, 0), (0, more), (0, 0)]) for array in pair] for pair in self._own]

    def _shift(self, by: int) -> None:
        """Moves all columns to the right, or to the left if `by` is negative."""
        self._column += by
        self._starts = [None if start is None else start + by for start in self._starts]
        for pair in self._own:
            for place, array in enumerate(pair):
                if by > 0:
                    pair[place] = mx.pad(array, [(0, 0), (0, 0), (by, 0), (0, 0)])
                else:
                    pair[place] = mx.contiguous(array[:, :, -by:])


def _empty(like: mx.array, slots: int) -> mx.array:
    return mx.zeros((slots, *like.shape[1:]), like.dtype)


def _with_slots(array: mx.array, more: int) -> mx.array:
    return mx.concatenate([array, _empty(array, more)])
