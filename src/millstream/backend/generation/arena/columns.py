"""An arena: keys and values of some rows in columns, with a map that says which token each column of a row holds.

Every pass writes the same columns of all rows, so a layer's write is one slice update. Masks come from the map: a row
may begin anywhere and have gaps, such as the padding of its prompt, and nothing is ever moved for alignment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

NOTHING = 1 << 30
"""The position of a column that holds no token. Later than all queries but those of padding, which see everything."""

SPARE = 16
"""Columns beyond those that are needed, at least, when an arena is laid out anew."""


def capacity_for(columns: int) -> int:
    """Multiples of 64 up to 1,024, then eight sizes for each doubling: few sizes, little waste."""
    step = max(64, (1 << columns.bit_length()) >> 4)
    return -(-columns // step) * step


class Columns:
    """Owner only. All layers of one kind, full attention or one size of window, for some rows.

    Live columns end at `next`, where the next pass writes. When they reach the end of the arena they are moved to its
    beginning, or to a larger one.
    """

    def __init__(self, window: int, rows: int = 0) -> None:
        """`window`: how many tokens a query sees; 0: all."""
        self.window = window
        self.capacity = self.next = 0
        self.reach = [0] * rows
        """How many columns before `next` each row still needs."""
        self.gap = [0] * rows
        """How many of these hold nothing."""
        self.parts: dict[int, mx.array] = {}
        """By number, (rows, heads, capacity, size): two for each layer."""
        self.positions = mx.full((rows, 0), NOTHING, dtype=mx.int32)
        """Of the tokens that the columns hold, (rows, capacity)."""
        self._begun = 0
        self._start = mx.zeros((1,), dtype=mx.int32)
        self._queries = self.positions
        self._masks: dict[tuple[int, bool], Any] = {}
        self._numbers: dict[tuple[int, mx.Dtype], tuple[mx.array, mx.array]] = {}

    @property
    def rows(self) -> int:
        return len(self.reach)

    @property
    def live(self) -> int:
        """How many columns some row needs."""
        return max(self.reach, default=0)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values()) + self.positions.nbytes

    # A pass.

    def reserve(self, count: int, more: int = 0) -> None:
        """Have room for `count` columns now, and for `more` after them if the arena has to be laid out for it."""
        if self.next + count > self.capacity:
            spare = SPARE + (self.live // 8 if self.window else more)
            self._lay_out(capacity_for(self.live + count + spare))

    def begin(self, count: int, queries: mx.array) -> None:
        """Begin a pass of `count` columns. `queries`: the positions of its tokens, (rows, count); NOTHING for
        padding."""
        self.reserve(count)
        self._begun, self._masks, self._numbers, self._queries = count, {}, {}, queries
        self._start = mx.array([self.next], dtype=mx.int32)
        self.positions = mx.slice_update(self.positions, queries, self._start, (1,))

    def write(self, number: int, new: mx.array) -> mx.array:
        """Write a part of one layer. Returns what attention reads, with the new columns."""
        held = self.parts.get(number)
        if held is None:
            rows, heads, _, size = new.shape
            held = mx.zeros((rows, heads, self.capacity, size), dtype=new.dtype)
        held = self.parts[number] = mx.slice_update(held, new, self._start, (2,))
        return self.view(held)

    def view(self, array: mx.array, axis: int = 2) -> mx.array:
        """What attention reads of a part. With a mask anyway it is all of it if that is little more: one operation
        less, and the same shape in many steps."""
        first, end = self.next - self.live, self.next + self._begun
        if not self._together:
            first, end = (0, self.capacity) if 8 * (end - first) >= 7 * self.capacity else (first, end)
        return columns_of(array, axis, first, end)

    @property
    def _together(self) -> bool:
        """Whether all rows begin in the same column and have no gaps."""
        return not any(self.gap) and len(set(self.reach)) <= 1

    def mask(self, count: int, window: int, *, as_array: bool) -> Any:
        """For a pass of `count` columns: None or "causal" where that says it all."""
        if (window, as_array) not in self._masks:
            self._masks[window, as_array] = self._mask(count, window, as_array)
        return self._masks[window, as_array]

    def _mask(self, count: int, window: int, as_array: bool) -> Any:
        seen_by_all = not window or self.live + count <= window
        if self._together and seen_by_all and (count == 1 or not as_array):
            return None if count == 1 else "causal"
        held = self.view(self.positions, 1)[:, None, None, :]
        asked = self._queries[:, None, :, None]
        seen = held <= asked
        return seen & (held > asked - window) if window else seen

    def as_numbers(self, mask: mx.array, kind: mx.Dtype) -> mx.array:
        """A mask of this pass as numbers to add, made once for all layers: 0 for what is seen."""
        if mask.dtype != mx.bool_:
            return mask
        if (id(mask), kind) not in self._numbers:
            numbers = mx.where(mask, mx.array(0, kind), mx.array(mx.finfo(kind).min, kind))
            self._numbers[id(mask), kind] = mask, numbers  # with the mask itself: no other one gets its id meanwhile
        return self._numbers[id(mask), kind][1]

    def end(self, counts: Sequence[int], kept: mx.array | None) -> None:
        """End the pass: each row keeps so many of its columns. `kept`: the positions that are left, if a row keeps
        fewer than it was asked for."""
        if kept is not None:
            self.positions = mx.slice_update(self.positions, kept, self._start, (1,))
        used = max(counts, default=0)
        self.next += used
        self._begun, self._masks, self._numbers = 0, {}, {}
        for row, count in enumerate(counts):
            self.gap[row] += used - count
            self.reach[row] += used
            if self.window:
                self.reach[row] = min(self.reach[row], self.window - 1 + self.gap[row])

    # Rows.

    def forget(self, row: int) -> None:
        """Nobody reads this row any more."""
        self.reach[row] = self.gap[row] = 0

    def take(self, keep: Sequence[int]) -> None:
        """Have these rows alone."""
        self._lay_out(capacity_for(max((self.reach[row] for row in keep), default=0) + SPARE), keep)

    def join(self, other: Columns | None, rows: Sequence[int], room: int) -> None:
        """Append rows of another arena; None: rows that hold nothing. `room`: columns that will follow."""
        width = 0 if other is None else max(other.reach[row] for row in rows)
        live = max(width, self.live)
        if not self.rows:
            self.capacity, self.next = capacity_for(live + room + SPARE), live
            self.positions = mx.full((0, self.capacity), NOTHING, dtype=mx.int32)
        elif width > self.next or live + 1 > self.capacity:
            self._lay_out(capacity_for(live + room + SPARE), behind=live)
        pick = None if other is None or list(rows) == list(range(other.rows)) else mx.array(list(rows), dtype=mx.int32)
        theirs = {} if other is None else other.parts

        def joined(held: mx.array | None, source: mx.array | None, axis: int, nothing: int) -> mx.array:
            like = held if source is None else source
            assert like is not None
            shape = [len(rows), *like.shape[1:]]
            pieces = [_blank(shape, axis, self.next - width if source is not None else self.capacity, nothing, like)]
            if source is not None:
                assert other is not None
                source = columns_of(source if pick is None else source[pick], axis, other.next - width, other.next)
                pieces += [source, _blank(shape, axis, self.capacity - self.next, nothing, like)]
            new = _concatenate(pieces, axis)
            if not self.rows:
                return new
            if held is None:
                held = mx.full([self.rows, *new.shape[1:]], nothing, dtype=like.dtype)
            return mx.concatenate([held, new])

        numbers = sorted({*self.parts, *theirs})
        self.parts = {number: joined(self.parts.get(number), theirs.get(number), 2, 0) for number in numbers}
        self.positions = joined(self.positions, None if other is None else other.positions, 1, NOTHING)
        self.reach += [0 if other is None else other.reach[row] for row in rows]
        self.gap += [0 if other is None else other.gap[row] for row in rows]

    def fill(self, parts: Sequence[mx.array], tokens: int) -> None:
        """The only row holds the last of so many tokens: `parts` in order, (1, heads, columns, size) each."""
        held = parts[0].shape[2]
        self.parts = dict(enumerate(parts))
        self.positions = mx.arange(tokens - held, tokens, dtype=mx.int32)[None]
        self.capacity = self.next = held
        self.reach = [min(held, self.window - 1) if self.window else held]

    def close_gaps(self) -> None:
        """Move the tokens of each row to the columns before `next`: one gather for each array."""
        first, width = self.next - self.live, max(reach - gap for reach, gap in zip(self.reach, self.gap, strict=True))
        held = self.positions[:, first : self.next]
        order = _oldest_first(held)[:, self.live - width :] + first
        index = order[:, None, :, None]
        self.parts = {number: mx.take_along_axis(part, index, axis=2) for number, part in self.parts.items()}
        self.positions = mx.take_along_axis(self.positions, order, axis=1)
        self.reach = [reach - gap for reach, gap in zip(self.reach, self.gap, strict=True)]
        self.gap = [0] * self.rows
        self.capacity = self.next = width

    def tokens(self, row: int, start: int, stop: int) -> list[mx.array]:
        """The parts of a row from one token to another, counted from the first one that it holds, (1, heads, tokens,
        size) each."""
        first = self.next - self.reach[row]
        if not self.gap[row]:
            found = slice(first + start, first + stop)
            return [self.parts[number][row : row + 1, :, found] for number in sorted(self.parts)]
        held = self.positions[row : row + 1, first : self.next]
        order = _oldest_first(held)[0, self.gap[row] + start : self.gap[row] + stop] + first
        return [mx.take(self.parts[number][row : row + 1], order, axis=2) for number in sorted(self.parts)]

    def _lay_out(self, capacity: int, keep: Sequence[int] | None = None, behind: int = 0) -> None:
        """Move the live columns into an arena of another size, with at least `behind` columns before `next`; only
        those of some rows."""
        rows = None
        if keep is not None:
            rows = None if list(keep) == list(range(self.rows)) else mx.array(list(keep), dtype=mx.int32)
            self.reach = [self.reach[row] for row in keep]
            self.gap = [self.gap[row] for row in keep]
        live, last = self.live, self.next
        behind = max(behind, live)

        def moved(array: mx.array, axis: int, nothing: int) -> mx.array:
            array = columns_of(array if rows is None else array[rows], axis, last - live, last)
            before = _blank(array.shape, axis, behind - live, nothing, array)
            after = _blank(array.shape, axis, capacity - behind, nothing, array)
            return _concatenate([before, array, after], axis)

        self._each(moved)
        self.capacity, self.next = capacity, behind

    def _each(self, change: Callable[[mx.array, int, int], mx.array]) -> None:
        self.parts = {number: change(part, 2, 0) for number, part in self.parts.items()}
        self.positions = change(self.positions, 1, NOTHING)


def columns_of(array: mx.array, axis: int, first: int, end: int) -> mx.array:
    if first == 0 and end == array.shape[axis]:
        return array
    return array[:, :, first:end] if axis == 2 else array[:, first:end]


def _oldest_first(positions: mx.array) -> mx.array:
    """The columns in the order of their tokens, those that hold nothing first."""
    return mx.argsort(mx.where(positions == NOTHING, -1, positions), axis=1)


def _concatenate(pieces: Sequence[mx.array], axis: int) -> mx.array:
    found = [each for each in pieces if each.shape[axis]]
    return found[0] if len(found) == 1 else mx.concatenate(found or list(pieces[:1]), axis=axis)


def _blank(shape: Sequence[int], axis: int, columns: int, nothing: int, like: mx.array) -> mx.array:
    return mx.full([columns if each == axis else size for each, size in enumerate(shape)], nothing, dtype=like.dtype)
