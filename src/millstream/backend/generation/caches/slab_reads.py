"""What a decode step reads of the slabs, with MLX's own operations: one masked attention for each slab.

The same for all layers, so it is prepared once per step.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from millstream.backend.generation.caches.pass_shape import PassShape
from millstream.backend.generation.caches.slabs import Parts, RowCache, SharedTokens, Slab
from millstream.backend.generation.caches.traced_step import Ref

VACANT = -1
"""The position of a row that nobody reads: a mixture of experts leaves it out. A new row may be at 0."""


@dataclass(slots=True, eq=False)
class SlabRead:
    """The rows of one slab: `numbers[i]` of the batch stands in slot `slots[i]`."""

    slab: Slab
    slots: list[int]
    numbers: list[int]
    queries: mx.array | None
    """The number to compute for each slot up to the last one in use; None if that is every row in order."""
    written: mx.array | None
    """The numbers whose tokens are written, one for each of `slots`; None if that is every row in order."""
    window: int = 0
    """How many tokens a row attends to; 0: all."""
    length: int = 1
    """New tokens of each row."""
    longest: int = 0
    ends: mx.array | None = None
    """The columns of the new tokens, (slots, length); None if they are the last ones of all."""
    mask: mx.array | str | None = None
    """True for what a query sees, (slots, 1, length, columns); "causal" if all slots end together."""

    @property
    def height(self) -> int:
        return self.slots[-1] + 1

    @property
    def consecutive(self) -> bool:
        return self.slots == list(range(self.slots[0], self.slots[0] + len(self.slots)))

    def begin(self, rows: Sequence[RowCache | None], length: int = 1) -> None:
        """Prepare a step: columns to write, and a mask if slots differ."""
        self.length = length
        tokens = [0] * self.height
        for slot, number in zip(self.slots, self.numbers, strict=True):
            row = rows[number]
            assert row is not None
            tokens[slot] = row.own
        capacity, most = self.slab.capacity, max(tokens)
        self.longest = min(most + length, capacity)
        self.ends = self.mask = None
        if min(tokens) == most and (not self.window or most + length <= self.window):
            self.mask = None if length == 1 else "causal"
            return
        positions = mx.array(tokens, dtype=mx.int32)[:, None] + mx.arange(length, dtype=mx.int32)
        columns = positions % capacity if self.window else positions
        if self.window:
            # A token that this pass writes after a query has an age beyond the row's tokens, or a ring's window.
            age = (columns[:, :, None] - mx.arange(self.longest) + capacity) % capacity
            seen = mx.minimum(positions + 1, self.window)
            self.mask = (age < seen[:, :, None])[:, None]
        else:
            self.mask = (mx.arange(self.longest) <= columns[:, :, None])[:, None]
        self.ends = columns if len(self.slots) == self.height else columns[mx.array(self.slots)]

    def refs(self) -> list[Ref]:
        """Its arrays, without those of the slab."""
        names = ("queries", "written", "ends", "mask")
        return [(self, name) for name in names if isinstance(getattr(self, name), mx.array)]

    def parts(self, layer: int) -> Parts:
        return tuple(part[: self.height, :, : self.longest] for part in self.slab.layers[layer])

    def write(self, layer: int, new: Parts) -> None:
        """Write the new tokens of a layer: parts of (rows, heads, length, size)."""
        parts, first = self.slab.layers[layer], self.longest - self.length
        for part, columns in zip(parts, new, strict=True):
            columns = columns[: len(self.numbers)] if self.written is None else columns[self.written]
            if self.ends is None and self.consecutive:
                part[self.slots[0] : self.height, :, first : self.longest] = columns
                continue
            ends = mx.arange(first, self.longest)[None] if self.ends is None else self.ends
            slots, heads = mx.array(self.slots), mx.arange(part.shape[1])
            if self.length == 1:
                part[slots[:, None], heads, ends] = columns[:, :, 0]
            else:
                part[slots[:, None, None], heads[:, None], ends[:, None]] = columns


@dataclass(slots=True, eq=False)
class SharedRead:
    """Tokens of the prefix cache, and the rows that read them: their queries run together over one copy."""

    tokens: SharedTokens
    numbers: mx.array

    def parts(self, layer: int) -> Parts:
        columns = slice(self.tokens.start, self.tokens.start + self.tokens.tokens)
        return tuple(part[:, :, columns] for part in self.tokens.layers[layer])


class SlabStep:
    """Owner only. `begin` prepares a step; after `changed` it looks at all rows again."""

    _PREPARED: tuple[str, ...] = ("reads", "shared", "order")
    """What depends on the rows, and not on their lengths."""

    def __init__(self, window: int = 0) -> None:
        """`window`: how many tokens a row attends to; 0: all."""
        self.window = window
        self.shape = PassShape(0, 0)
        self.offset = mx.zeros((0,), dtype=mx.int32)
        """The position of each flat row's token."""
        self.reads: list[SlabRead] = []
        self.shared: list[SharedRead] = []
        self.order: mx.array | None = None
        """For each row of the forward pass, where the reads have it; None if that is the same."""
        self._looked: dict[int, dict[str, Any]] = {}
        """By the rows of a pass, what is the same in every step until rows change."""

    def prepare(self, rows: Sequence[RowCache]) -> None:
        """Rows join: what can be prepared of them before their first step."""

    def changed(self) -> None:
        """Rows have joined, moved or left."""
        self._looked.clear()

    def begin(self, rows: Sequence[RowCache | None], shape: PassShape) -> None:
        self.shape = shape
        lengths = [VACANT if row is None else row.length for row in rows[: shape.rows]]
        lengths += [VACANT] * (shape.rows - len(lengths))
        positions = self._positions(lengths)
        if shape.rows not in self._looked:
            self._look(rows, shape.rows, positions)
            self._looked[shape.rows] = {name: getattr(self, name) for name in self._PREPARED}
        for name, value in self._looked[shape.rows].items():
            setattr(self, name, value)
        self.offset = self._sent(positions)
        for read in self.reads:
            read.begin(rows, shape.length)

    def _positions(self, lengths: list[int]) -> list[int]:
        """Of the token in each flat row."""
        if self.shape.length == 1:
            return lengths
        each = range(self.shape.length)
        flat = [VACANT if length == VACANT else length + token for length in lengths for token in each]
        return flat[: self.shape.width]

    def _sent(self, positions: list[int]) -> mx.array:
        """As an array."""
        return mx.array(positions, dtype=mx.int32)

    def key(self) -> Hashable | None:
        """See `TracedStep.step_key`. MLX's slices and masks follow the longest row: such a step is traced for tests
        only, since every token is another key."""
        if self.shared:
            return None
        return tuple((*read.slots, -1, read.longest, *(name for _, name in read.refs())) for read in self.reads)

    def refs(self) -> list[Ref]:
        """The arrays that a step reads: see `TracedStep`."""
        found: list[Ref] = [(self, "offset"), *([] if self.order is None else [(self, "order")])]
        for read in self.reads:
            found += read.refs()
        return found + self.result_refs()

    def result_refs(self) -> list[Ref]:
        """The arrays that it replaces."""
        return [(parts, index) for read in self.reads for parts in read.slab.layers for index in range(len(parts))]

    def _look(self, rows: Sequence[RowCache | None], size: int, positions: list[int]) -> None:
        by_slab: dict[int, list[tuple[int, int]]] = {}
        slabs: dict[int, Slab] = {}
        for number, row in enumerate(rows):
            if row is not None:
                slabs[id(row.place)] = row.place
                by_slab.setdefault(id(row.place), []).append((row.slot, number))
        self.reads, order, height = [], [0] * size, 0
        for key, places in by_slab.items():
            self.reads.append(_read(slabs[key], sorted(places), size, self.window))
            for slot, number in places:
                order[number] = height + slot
            height += self.reads[-1].height
        self.order = None if order == list(range(height)) else mx.array(order, dtype=mx.int32)
        self._look_at_shared(rows)

    def _look_at_shared(self, rows: Sequence[RowCache | None]) -> None:
        readers: dict[tuple[int, int, int], list[int]] = {}
        tokens: dict[tuple[int, int, int], SharedTokens] = {}
        for number, row in enumerate(rows):
            for piece in row.shared if row is not None else ():
                key = (id(piece.layers[0][0]), piece.start, piece.tokens)
                tokens[key] = piece
                readers.setdefault(key, []).append(number)
        self.shared = [SharedRead(tokens[key], mx.array(numbers)) for key, numbers in readers.items()]


def _read(slab: Slab, places: Sequence[tuple[int, int]], size: int, window: int) -> SlabRead:
    slots, numbers = [slot for slot, _ in places], [number for _, number in places]
    computed = [numbers[0]] * (slots[-1] + 1)
    for slot, number in places:
        computed[slot] = number
    in_order = numbers == list(range(len(numbers)))
    every = computed == list(range(size))
    return SlabRead(
        slab,
        slots,
        numbers,
        queries=None if every else mx.array(computed, dtype=mx.int32),
        written=None if in_order else mx.array(numbers, dtype=mx.int32),
        window=window,
    )
