"""Slabs as our CUDA kernels see them: by address, with a list of work items for each step.

MLX sees none of these reads and writes. So three things must hold: each step is evaluated by itself, slabs are
contiguous, and the host never reads one.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import mlx.core as mx

from millstream.backend.generation.caches.joining import JoiningRows
from millstream.backend.generation.caches.pass_shape import PassShape
from millstream.backend.generation.caches.slab_reads import VACANT, SlabStep
from millstream.backend.generation.caches.slabs import Move, RowCache, Slab
from millstream.backend.generation.caches.traced_step import Ref
from millstream.backend.kernels.decode_attention import MOST_CHUNKS, DecodeWork, span_for, spans
from millstream.backend.kernels.write_rows import addresses_of, join_rows, move_rows, write_rows

ROUND_ITEMS, ROUND_SLABS = 64, 16
"""Work items and addresses are padded to multiples: every new number of them costs the host a trace."""

FAR_FROM_HOST = 4
"""Integers of an array, at least, that every block of a kernel reads: MLX keeps arrays of up to 8 bytes, and those made
by the host, in the host's memory. Over the bus a read takes longer than all the rest of a short row's attention."""

NO_ITEM = (-1, *[0] * 11)


def _padded(numbers: list[int]) -> list[int]:
    return numbers + [0] * (FAR_FROM_HOST - len(numbers))


def _no_tokens(number: int, item: int) -> tuple[int, ...]:
    return (number, -1, 0, 0, 0, 0, 0, 0, 0, item, 1, 0)


class Addresses:
    """Where the arrays of slabs and of shared tokens are, for those in use."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._known: dict[int, tuple[Sequence[mx.array], mx.array]] = {}
        """By the first array, which is held: so no other gets its number."""
        self._numbers: dict[int, int] = {}
        self._tables: dict[tuple[int, ...], mx.array] = {}
        """By what has a number: a join and the step after it mostly have the same."""

    def number(self, arrays: Sequence[mx.array]) -> int:
        """The number in `table` of some arrays: the parts of all layers."""
        key = id(arrays[0])
        if key not in self._known:
            mx.async_eval(list(arrays))  # type: ignore[no-untyped-call]
            self._known[key] = (arrays, addresses_of(arrays))
        return self._numbers.setdefault(key, len(self._numbers))

    def slab(self, slab: Slab) -> int:
        """The number of a slab, whose parts are views of few buffers."""
        key = id(slab.buffers[0])
        if key not in self._known:
            mx.async_eval(slab.buffers)  # type: ignore[no-untyped-call]
            buffers = mx.array([buffer for buffer, _ in slab.where], dtype=mx.int32)
            places = mx.array([place for _, place in slab.where], dtype=mx.int64)
            self._known[key] = (slab.buffers, addresses_of(slab.buffers)[buffers] + places)
        return self._numbers.setdefault(key, len(self._numbers))

    def forget(self) -> None:
        """Start to number again."""
        self._numbers = {}

    def drop_others(self) -> None:
        """Hold nothing but what has a number."""
        self._known = {key: self._known[key] for key in self._numbers}
        self._tables = {keys: table for keys, table in self._tables.items() if self._known.keys() >= set(keys)}

    def table(self) -> mx.array:
        """(slabs, layers, parts)."""
        keys = tuple(self._numbers)
        if keys not in self._tables:
            rows = [self._known[key][1] for key in keys]
            rows += [rows[0]] * (-len(rows) % ROUND_SLABS) if rows else []
            self._tables[keys] = mx.stack(rows).reshape(len(rows), self._layers, -1)
        return self._tables[keys]


class KernelStep(SlabStep):
    """Owner only. Prepares the work items of a step, for all layers of one kind: `window`, or full attention."""

    _PREPARED = ("_items", "_counters", "_table", "_parted")

    def __init__(self, layers: int, window: int = 0) -> None:
        super().__init__(window)
        self.addresses = Addresses(layers)
        self.layer_numbers = [mx.arange(index, index + FAR_FROM_HOST, dtype=mx.int32) for index in range(layers)]
        """The first integer of each."""
        mx.eval(self.layer_numbers)
        self.rows: Sequence[RowCache | None] = ()
        """The rows of this step."""
        self._parted = False
        self._expected: list[int] = []
        """Positions, if the next step has the same rows."""
        self._due: list[mx.array] = []
        """What is sent to the device before the next step."""
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
        if self._due:
            # All at once, and not as part of the step: CUDA graphs of other operations are made anew, which takes
            # milliseconds.
            mx.async_eval(self._due)  # type: ignore[no-untyped-call]
            self._due = []

    def _far(self, numbers: list[Any]) -> mx.array:
        """In memory of the device, once it is sent."""
        made = mx.array(numbers, dtype=mx.int32)
        far = made + 0
        self._due += [made, far]  # both are held until then, so that none gets the memory of the other
        return far

    def _positions(self, lengths: list[int]) -> list[int]:
        if self.shape.length > 1:
            self._lengths = mx.array(_padded(lengths), dtype=mx.int32)
        return super()._positions(lengths)

    def _sent(self, positions: list[int]) -> mx.array:
        """What the device has of the last step, and one more: so the host sends positions only when rows change. The
        sum is there in any case: a step with other operations would be another CUDA graph."""
        if positions != self._expected:
            one = [int(position != VACANT) for position in positions]
            self._increments = self._far(_padded(one))
            before = [position - more for position, more in zip(positions, one, strict=True)]
            self._counted = mx.array(_padded(before), dtype=mx.int32)
        # What is held is not overwritten: the sum gets memory of the device.
        self._before, self._counted = self._counted, self._counted + self._increments
        self._expected = [position if position == VACANT else position + 1 for position in positions]
        return self._counted if len(positions) == self._counted.size else self._counted[: len(positions)]

    def _look(self, rows: Sequence[RowCache | None], size: int) -> None:
        self.addresses.forget()
        items: list[tuple[int, ...]] = []
        for number in range(size):
            row = rows[number] if number < len(rows) else None
            found = [] if row is None else self._items_of(number, row)
            first = len(items)
            columns = 0 if row is None or row.shared else found[0][5]
            items += [(*item, first, len(found), columns) for item in found] or [_no_tokens(number, first)]
        self._parted = len(items) > size
        items += [NO_ITEM] * (-len(items) % ROUND_ITEMS) if self._parted else []
        self._items = self._far(items)
        groups = max((row.place.most_heads for row in rows if row is not None), default=0)
        counted = len(_padded([0] * size)) * groups * MOST_CHUNKS
        self._counters = mx.zeros((counted if self._parted else 1,), dtype=mx.int32)
        self.addresses.drop_others()
        self._table = self.addresses.table() if groups else self._table
        self._due += [self._counters, self._table]

    def _items_of(self, number: int, row: RowCache) -> list[tuple[int, ...]]:
        """The first nine integers of each."""
        layer = row.place.layers[0]
        span = span_for(layer[0].shape[1], sum(part.shape[3] * part.dtype.size for part in layer))
        items: list[tuple[int, ...]] = []
        for piece in row.shared:
            arrays = [part for parts in piece.layers for part in parts]
            slab, capacity, start = self.addresses.number(arrays), arrays[0].shape[2], piece.start
            for first, beyond in spans(piece.tokens, span):
                items.append((number, slab, 0, capacity, start + first, start + beyond, 0, 0, 0))
        slab, capacity = self.addresses.slab(row.place), row.place.capacity
        for first, beyond in spans(capacity, span):
            items.append((number, slab, row.slot, capacity, first, beyond, row.origin, 1, self.window))
        return items


class KernelWriter:
    """Writes in place: each launch is evaluated by itself, before the step that reads it."""

    in_place = True

    def __init__(self, addresses: Addresses) -> None:
        self._addresses = addresses

    def join(self, rows: Sequence[RowCache], joining: JoiningRows) -> None:
        self._addresses.forget()
        places = []
        for index, row in enumerate(rows):
            if row.kept:
                slab, source = row.place, joining.source(index)
                columns = (source.stop - row.kept, row.kept, (row.own - row.kept) % slab.capacity)
                places.append((self._addresses.slab(slab), row.slot, slab.capacity, source.row, *columns, 0))
        if places:
            _evaluate(join_rows(joining.arrays, places, self._addresses.table()))

    def move(self, moves: Sequence[Move]) -> None:
        moves = [move for move in moves if move.tokens]
        if not moves:
            return
        if len({part.shape[1] for part in moves[0].source.arrays}) > 1:
            _evaluate([each for move in moves for each in _move_by_layer(move)])
            return
        self._addresses.forget()
        orders = [
            (
                *(self._addresses.slab(move.source), move.source_slot, move.source.capacity),
                *(self._addresses.slab(move.target), move.target_slot, move.target.capacity),
                *(move.tokens, 0),
            )
            for move in moves
        ]
        _evaluate([move_rows(orders, self._addresses.table(), moves[0].source.arrays)])


def _move_by_layer(move: Move) -> list[mx.array]:
    source = slice(move.source_slot, move.source_slot + 1)
    target = mx.array([[move.target_slot, 0, move.tokens, 0]], dtype=mx.int32)
    return [
        write_rows(new, old[source, :, : move.tokens], target)
        for old, new in zip(move.source.arrays, move.target.arrays, strict=True)
    ]


def _evaluate(arrays: Sequence[mx.array]) -> None:
    if arrays:
        mx.async_eval(list(arrays))  # type: ignore[no-untyped-call]
