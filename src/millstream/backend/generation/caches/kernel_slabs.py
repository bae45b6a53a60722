"""Slabs as our CUDA kernels see them: by address, with a list of work items for each step.

MLX sees none of these reads and writes. So three things must hold: each step is evaluated by itself, slabs are
contiguous, and the host never reads one.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from millstream.backend.generation.caches.due import ALIGNED, Due
from millstream.backend.generation.caches.joining import JoiningRows
from millstream.backend.generation.caches.pass_shape import PassShape
from millstream.backend.generation.caches.slab_reads import VACANT, SlabStep
from millstream.backend.generation.caches.slabs import Buffers, Move, Parts, RowCache, Slab
from millstream.backend.generation.caches.traced_step import Ref
from millstream.backend.kernels.decode_attention import ITEM, MOST_CHUNKS, DecodeWork, span_for, spans
from millstream.backend.kernels.write_rows import addresses_of, join_rows, move_rows, write_rows

ROUND_ITEMS, ROUND_SLABS = 64, 16
"""Work items and addresses are padded to multiples: every new number of them costs the host a trace."""

ROW, FIRST_ITEM = 0, 9
"""The integers of a work item that depend on where its row is in the batch."""

NO_ITEM = np.array([-1, *[0] * (ITEM - 1)], dtype=np.int32)
NO_TOKENS = np.array([0, -1, *[0] * 8, 1, 0], dtype=np.int32).tobytes()
"""The item of a row that is vacant."""


def _padded(numbers: list[int]) -> list[int]:
    return numbers + [0] * (ALIGNED - len(numbers))


class Addresses:
    """Where the arrays of slabs and of shared tokens are. Each has a number for as long as it is in use: its line in
    `table`, which is changed only when something new gets a number."""

    def __init__(self, layers: int, due: Due) -> None:
        self._layers = layers
        self._due = due
        self._numbers: dict[int, int] = {}
        """By the identity of a slab, or of the first array of shared tokens."""
        self._held: dict[int, object] = {}
        """What has a number: so no other object gets its identity, and its memory stays."""
        self._shared: set[int] = set()
        self._vacant: list[int] = []
        self._table: mx.array | None = None
        self._places: dict[Buffers, tuple[mx.array, mx.array]] = {}

    @property
    def table(self) -> mx.array:
        """(slabs, layers, parts)."""
        assert self._table is not None, "nothing has a number"
        return self._table

    def slab(self, slab: Slab) -> int:
        """The number of a slab."""
        number = self._numbers.get(id(slab))
        return self._add(id(slab), slab, self._of_slab(slab)) if number is None else number

    def shared(self, layers: Sequence[Parts]) -> int:
        """The number of arrays that hold tokens which rows share."""
        key = id(layers[0][0])
        number = self._numbers.get(key)
        if number is None:
            arrays = [part for parts in layers for part in parts]
            self._shared.add(key)
            number = self._add(key, layers[0][0], addresses_of(arrays))
            self._held[key] = arrays
        return number

    def forget(self, slab: Slab) -> None:
        """A slab is no longer in use."""
        self._release(id(slab))

    def forget_shared(self, used: set[int]) -> None:
        """Shared tokens are in use no longer, but for those whose first array is one of these, by identity."""
        for key in self._shared - used:
            self._shared.remove(key)
            self._release(key)

    def _release(self, key: int) -> None:
        if key in self._numbers:
            heapq.heappush(self._vacant, self._numbers.pop(key))
            del self._held[key]

    def _add(self, key: int, held: object, line: mx.array) -> int:
        if not self._vacant:
            self._grow(line.shape[0])
        number = self._numbers[key] = heapq.heappop(self._vacant)
        self._held[key] = held
        table = self.table[:]  # steps that are under way have the old one
        table[number : number + 1] = line.reshape(1, *table.shape[1:])
        self._table = table
        self._due.add(table)
        return number

    def _grow(self, parts: int) -> None:
        lines = len(self._numbers)
        self._vacant = list(range(lines, lines + ROUND_SLABS))
        new = mx.zeros((ROUND_SLABS, self._layers, parts // self._layers), dtype=mx.int64)
        self._table = new if self._table is None else mx.concatenate([self._table, new])

    def _of_slab(self, slab: Slab) -> mx.array:
        """Its parts are views of few buffers, at places that grow with its tokens."""
        arranged = slab.arranged
        if arranged not in self._places:
            which, units = mx.array(arranged.which, dtype=mx.int32), mx.array(arranged.units, dtype=mx.int64)
            self._places[arranged] = which, units
        which, units = self._places[arranged]
        found = addresses_of(slab.buffers)
        places = units * (len(slab.rows) * slab.capacity)
        return (found if len(slab.buffers) == 1 else found[which]) + places


class KernelStep(SlabStep):
    """Owner only. Prepares the work items of a step, for all layers of one kind: `window`, or full attention."""

    _PREPARED = ("_items", "_counters", "_table", "_parted")

    def __init__(self, templates: Sequence[Parts], window: int, due: Due) -> None:
        super().__init__(window)
        layers = len(templates)
        self._due = due
        self.addresses = Addresses(layers, due)
        self.layer_numbers = [mx.arange(index, index + ALIGNED, dtype=mx.int32) for index in range(layers)]
        """The first integer of each."""
        mx.eval(self.layer_numbers)
        layer = templates[0] if templates else ()
        self._span = span_for(layer[0].shape[1], sum(part.shape[3] * part.dtype.size for part in layer)) if layer else 1
        self._groups = max((part.shape[1] for parts in templates for part in parts), default=0)
        self.rows: Sequence[RowCache | None] = ()
        """The rows of this step."""
        self._parted = False
        self._expected: list[int] = []
        """Positions, if the next step has the same rows."""
        self._zeros: dict[int, mx.array] = {}
        self._before = self._counted = self._increments = mx.zeros((0,), dtype=mx.int32)
        self._items = self._counters = self._table = self._lengths = mx.zeros((0,), dtype=mx.int32)

    @property
    def work(self) -> DecodeWork:
        count = self.shape.length
        lengths = self.offset if count == 1 else self._lengths
        return DecodeWork(self._items, self._parted, self._table, lengths, self._counters, count)

    def key(self) -> Hashable | None:
        return self._parted

    def refs(self) -> list[Ref]:
        names = ("offset", "_items", "_table", "_counters")
        return [(self, name) for name in (names if self.shape.length == 1 else (*names, "_lengths"))]

    def result_refs(self) -> list[Ref]:
        return []

    def begin(self, rows: Sequence[RowCache | None], shape: PassShape) -> None:
        self.rows = rows
        super().begin(rows, shape)

    def _positions(self, lengths: list[int]) -> list[int]:
        if self.shape.length > 1:
            self._lengths = mx.array(_padded(lengths), dtype=mx.int32)
        return super()._positions(lengths)

    def _sent(self, positions: list[int]) -> mx.array:
        """What the device has of the last step, and one more: so the host sends positions only when rows change. The
        sum is there in any case: a step with other operations would be another CUDA graph."""
        if positions != self._expected:
            self._increments, self._counted = self._due.integers(*_counting(positions))
        # What is held is not overwritten: the sum gets memory of the device.
        self._before, self._counted = self._counted, self._counted + self._increments
        self._expected = [position if position == VACANT else position + 1 for position in positions]
        return self._counted if len(positions) == self._counted.size else self._counted[: len(positions)]

    def _look(self, rows: Sequence[RowCache | None], size: int, positions: list[int]) -> None:
        blocks, counts = [NO_TOKENS] * size, [1] * size
        shared: set[int] = set()
        last, slab = None, -1
        for number, row in enumerate(rows[:size]):
            if row is None:
                continue
            if row.slab is not last:
                last, slab = row.slab, self.addresses.slab(row.place)
            blocks[number] = self._known_items(row, slab)
            counts[number] = len(blocks[number]) // (4 * ITEM)
            if row.shared:
                shared |= {id(piece.layers[0][0]) for piece in row.shared}
        self.addresses.forget_shared(shared)
        items = np.frombuffer(bytearray(b"".join(blocks)), dtype=np.int32).reshape(-1, ITEM)
        numbers = np.repeat(np.arange(size), counts)
        items[:, ROW] = numbers
        items[:, FIRST_ITEM] = (np.cumsum(counts) - counts)[numbers]
        self._parted = len(items) > size
        if self._parted and (missing := -len(items) % ROUND_ITEMS):
            items = np.concatenate([items, np.tile(NO_ITEM, (missing, 1))])
        sent, self._increments, self._counted = self._due.integers(items.reshape(-1), *_counting(positions))
        self._expected = positions
        self._items = sent.reshape(items.shape)
        self._counters = self._zero_counters(size)
        if any(row is not None for row in rows):
            self._table = self.addresses.table
        self._due.add(self._items, self._table)

    def prepare(self, rows: Sequence[RowCache]) -> None:
        """The work items of rows that join, and the addresses in them: before the step that first needs them."""
        for row in rows:
            self._known_items(row, self.addresses.slab(row.place))

    def _known_items(self, row: RowCache, slab: int) -> bytes:
        """The work items of a row in the slab with this number; made when the row has got its slot."""
        known = row.items
        if known is None or known[0] != slab or known[1] != row.slot:
            known = row.items = (slab, row.slot, self._items_of(row, slab).tobytes())
        return known[2]

    def _zero_counters(self, size: int) -> mx.array:
        """A launch leaves zeros behind, so the same ones serve every step."""
        count = max(ALIGNED, size) * self._groups * MOST_CHUNKS if self._parted else 1
        if count not in self._zeros:
            self._zeros[count] = mx.zeros((count,), dtype=mx.int32)
            self._due.add(self._zeros[count])
        return self._zeros[count]

    def _items_of(self, row: RowCache, slab: int) -> NDArray[np.int32]:
        """The work items of a row, but for what depends on its number in the batch."""
        items: list[tuple[int, ...]] = []
        for piece in row.shared:
            number, capacity, start = self.addresses.shared(piece.layers), piece.layers[0][0].shape[2], piece.start
            for first, beyond in spans(piece.tokens, self._span):
                items.append((0, number, 0, capacity, start + first, start + beyond, 0, 0, 0))
        capacity = row.place.capacity
        for first, beyond in spans(capacity, self._span):
            items.append((0, slab, row.slot, capacity, first, beyond, row.origin, 1, self.window))
        columns = 0 if row.shared else items[0][5]
        return np.array([(*item, 0, len(items), columns) for item in items], dtype=np.int32)


class KernelWriter:
    """Writes in place, behind MLX's back: before the step that reads it, and not together with what could touch the
    same slots."""

    in_place = True

    def __init__(self, templates: Sequence[Parts], addresses: Addresses, due: Due) -> None:
        self._parts = [part for parts in templates for part in parts]
        self._addresses = addresses
        self._due = due
        self._last_round = -1

    def join(self, rows: Sequence[RowCache], joining: JoiningRows) -> None:
        """Into slots that are vacant: nothing that was not sent yet touches them, unless a row had them meanwhile. See
        `finish`."""
        places = []
        for index, row in enumerate(rows):
            own, kept = row.own, row.kept
            if kept:
                slab, (source, stop) = row.place, joining.source(index)
                capacity = slab.capacity
                number = self._addresses.slab(slab)
                places.append((number, row.slot, capacity, source, stop - kept, kept, (own - kept) % capacity, 0))
        if places:
            self._last_round = self._due.rounds
            self._due.add(*join_rows(joining.arrays, places, self._addresses.table))

    def move(self, moves: Sequence[Move]) -> None:
        moves = [move for move in moves if move.tokens]
        if not moves:
            return
        self.finish()
        self._last_round = self._due.rounds
        self._due.hold(*(move.source for move in moves))
        if len({part.shape[1] for part in self._parts}) > 1:
            self._due.add(*(each for move in moves for each in _move_by_layer(move)))
            return
        orders = [
            (
                *(self._addresses.slab(move.source), move.source_slot, move.source.capacity),
                *(self._addresses.slab(move.target), move.target_slot, move.target.capacity),
                *(move.tokens, 0),
            )
            for move in moves
        ]
        self._due.add(move_rows(orders, self._addresses.table, self._parts))

    def finish(self) -> None:
        """Send what was written, before slots change hands: rows that leave, and rows that move."""
        if self._last_round == self._due.rounds:
            self._due.send()

    def free(self, slab: Slab) -> None:
        self._addresses.forget(slab)


def _counting(positions: list[int]) -> tuple[list[int], list[int]]:
    """What is added in every step, and what the positions were a step before."""
    one = [int(position != VACANT) for position in positions]
    return one, [position - more for position, more in zip(positions, one, strict=True)]


def _move_by_layer(move: Move) -> list[mx.array]:
    source = slice(move.source_slot, move.source_slot + 1)
    target = mx.array([[move.target_slot, 0, move.tokens, 0]], dtype=mx.int32)
    return [
        write_rows(new, old[source, :, : move.tokens], target)
        for old, new in zip(move.source.arrays, move.target.arrays, strict=True)
    ]
