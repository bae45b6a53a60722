"""Decode attention over slabs with random tokens, and what it must give: for the kernel, and for NumPy in its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from millstream.backend.generation.caches.pass_shape import PassShape
from millstream.backend.kernels.decode_attention import MOST_CHUNKS, DecodeWork, Packing, spans

LAYERS, LAYER, SKIPPED = 2, 1, 20
"""Layers of a slab, the one that is computed, and columns before those that rows share."""


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """Rows of these `lengths`, of which `shared` tokens more are in another slab, and one row without tokens."""

    lengths: tuple[int, ...]
    dtype: mx.Dtype = mx.float16
    size: int = 64
    groups: int = 2
    share: int = 4
    count: int = 1
    cut: int = 0
    """Flat rows that are missing at the end: the last row, which has no tokens, is not there as a whole."""
    window: int = 0
    capacity: int = 256
    shared: int = 0
    span: int | None = None
    """Columns of a work item, if not as usual."""
    packing: Packing | None = None
    sinks: bool = False
    softcap: float | None = None


class DecodeRun:
    """One case with random numbers."""

    def __init__(self, case: DecodeCase, addresses_of: Callable[[Sequence[mx.array]], mx.array]) -> None:
        self.case = case
        rows = len(case.lengths) + 1
        heads = case.groups * case.share
        self.queries = self._random(rows, heads, case.count)
        self.new = (self._random(rows, case.groups, case.count), self._random(rows, case.groups, case.count))
        self.sinks = mx.random.normal((heads,)).astype(case.dtype) if case.sinks else None
        slots = -(-len(case.lengths) // 2)
        shapes = [(slots, case.capacity), (slots, case.capacity)] + ([(1, case.shared + 50)] if case.shared else [])
        self.slabs = [self._slab(slots, capacity) for slots, capacity in shapes]
        mx.eval(self.queries, self.new, self.slabs)
        self.before = [[part * 1 for part in slab] for slab in self.slabs]
        mx.eval(self.before)
        items = self._items()
        parted = len(items) > rows
        table = mx.stack([addresses_of(slab) for slab in self.slabs]).reshape(len(self.slabs), LAYERS, -1)
        lengths = [length + case.shared for length in case.lengths] + [0]
        self.work = DecodeWork(
            mx.array(items + [(-1, *[0] * 11)] * (5 if parted else 0), dtype=mx.int32),
            parted,
            table,
            mx.array(lengths, dtype=mx.int32),
            mx.zeros((MOST_CHUNKS * rows * case.groups,), dtype=mx.int32),
            case.count,
        )
        self.shape = PassShape(rows, rows * case.count - case.cut, case.count)
        self.layer = mx.array([LAYER], dtype=mx.int32)
        self.scale = case.size**-0.5

    def run(self, decode: Callable[..., mx.array]) -> mx.array:
        flat = [self.shape.flattened(each) for each in (self.queries, *self.new)]
        out = decode(
            flat[0],
            (flat[1], flat[2]),
            self.work,
            self.layer,
            self.scale,
            sinks=self.sinks,
            softcap=self.case.softcap,
            packing=self.case.packing,
        )
        mx.eval(out)
        return self.shape.grouped(out)

    def expected(self) -> mx.array:
        """By the formula, in float32."""
        rows = [self._row(row) for row in range(len(self.case.lengths))]
        return mx.stack([*rows, mx.zeros(self.queries.shape[1:])])

    def wrong_columns(self) -> int:
        """How many columns of the slabs hold something else than they should."""
        expected = [[part * 1 for part in slab] for slab in self.before]
        for row, length in enumerate(self.case.lengths):
            for number in range(self.case.count):
                column = (length + number) % self.case.capacity if self.case.window else length + number
                for part, fresh in enumerate(self._packed(self.new[0]) + self._packed(self.new[1])):
                    index = LAYER * len(self.slabs[0]) // LAYERS + part
                    expected[row % 2][index][row // 2, :, column] = fresh[row, :, number]
        pairs = [
            pair for slab, wanted in zip(self.slabs, expected, strict=True) for pair in zip(slab, wanted, strict=True)
        ]
        return sum(int(mx.any(part != wanted, axis=-1).sum().item()) for part, wanted in pairs)

    def _random(self, *shape: int) -> mx.array:
        return mx.random.normal((*shape, self.case.size)).astype(self.case.dtype)

    def _slab(self, slots: int, capacity: int) -> list[mx.array]:
        parts = [self._random(slots, self.case.groups, capacity) for _ in range(2 * LAYERS)]
        return [packed for part in parts for packed in self._packed(part)]

    def _packed(self, array: mx.array) -> list[mx.array]:
        packing = self.case.packing
        if packing is None:
            return [array]
        return list(mx.quantize(array, group_size=packing.group_size, bits=packing.bits))

    def _items(self) -> list[tuple[int, ...]]:
        case = self.case
        items: list[tuple[int, ...]] = []
        for row in range(len(case.lengths)):
            first = len(items)
            pieces: list[tuple[int, ...]] = []
            for start, stop in spans(case.shared) if case.shared else []:
                pieces.append((row, 2, 0, case.shared + 50, SKIPPED + start, SKIPPED + stop, 0, 0, 0))
            for start, stop in spans(case.capacity, *([] if case.span is None else [case.span])):
                pieces.append((row, row % 2, row // 2, case.capacity, start, stop, case.shared, 1, case.window))
            size = 0 if case.shared else pieces[0][5]
            items += [(*piece, first, len(pieces), size) for piece in pieces]
        return [*items, (len(case.lengths), -1, *[0] * 7, len(items), 1, 0)]

    def _row(self, row: int) -> mx.array:
        case = self.case
        keys, values = (self._tokens(row, part) for part in (0, 1))
        queries = self.queries[row].astype(mx.float32).reshape(case.groups, case.share, case.count, case.size)
        scores = mx.einsum("hgqd,hkd->hgqk", queries, keys) * self.scale
        if case.softcap is not None:
            scores = case.softcap * mx.tanh(scores / case.softcap)
        length = keys.shape[1]
        own = mx.arange(length - case.count, length)[:, None]
        seen = (mx.arange(length) <= own) & (mx.arange(length) > own - (case.window or length))
        scores = mx.where(seen, scores, -1e30)
        top = mx.max(scores, axis=-1, keepdims=True)
        weights = mx.exp(scores - top)
        total = mx.sum(weights, axis=-1, keepdims=True)
        if self.sinks is not None:
            total = total + mx.exp(self.sinks.astype(mx.float32).reshape(case.groups, case.share, 1, 1) - top)
        return mx.einsum("hgqk,hkd->hgqd", weights / total, values).reshape(-1, case.count, case.size)

    def _tokens(self, row: int, part: int) -> mx.array:
        """All keys or values of a row that are still there, as floats, oldest first."""
        case = self.case
        length = case.lengths[row]
        oldest = max(0, length - case.capacity + case.count) if case.window else 0
        columns = mx.array([number % case.capacity for number in range(oldest, length)], dtype=mx.int32)
        fresh = self._packed(self.new[part])
        start = (LAYER * 2 + part) * len(fresh)
        found = []
        for index, new in enumerate(fresh):
            pieces = [self.before[row % 2][start + index][row // 2][:, columns], new[row]]
            if case.shared:
                pieces.insert(0, self.before[2][start + index][0, :, SKIPPED : SKIPPED + case.shared])
            found.append(mx.concatenate(pieces, axis=1))
        return self._unpacked(found)

    def _unpacked(self, parts: Sequence[Any]) -> mx.array:
        packing = self.case.packing
        if packing is None:
            plain: mx.array = parts[0].astype(mx.float32)
            return plain
        words, scales, biases = parts[0], parts[1].astype(mx.float32), parts[2].astype(mx.float32)
        return mx.dequantize(words, scales, biases, group_size=packing.group_size, bits=packing.bits)


PACKED_8, PACKED_4 = Packing(8, 64), Packing(4, 64)
CASES = {
    "short rows": DecodeCase((37, 0, 15, 250)),
    "parts": DecodeCase((37, 2000, 511, 512), capacity=2048),
    "shared tokens": DecodeCase((0, 60, 200), shared=700),
    "rings": DecodeCase((5, 79, 95, 96, 200, 1000), window=80, capacity=96),
    "rings in parts": DecodeCase((5, 96, 200), window=80, capacity=96, span=32),
    "several queries": DecodeCase((37, 0, 15, 200), share=2, count=4),
    "several queries in rings": DecodeCase((5, 94, 200), groups=1, count=4, window=80, capacity=96, span=32),
    "more queries than a block takes": DecodeCase((37, 0, 15, 200), count=9, cut=4),
    "many queries in parts": DecodeCase((37, 0, 480, 700), count=17, capacity=1024, span=128, cut=16),
    "many queries in rings": DecodeCase((5, 94, 200), share=8, count=9, window=80, capacity=96, span=32),
    "many queries of few heads": DecodeCase((37, 80, 200), share=1, count=17, sinks=True),
    "many queries after shared tokens": DecodeCase((0, 60, 200), share=3, count=9, shared=700, sinks=True),
    "sinks": DecodeCase((37, 0, 900), sinks=True, capacity=1024),
    "soft caps": DecodeCase((37, 0, 900), softcap=3.0, capacity=1024),
    "8 bits": DecodeCase((37, 0, 15, 900), packing=PACKED_8, capacity=1024),
    "4 bits": DecodeCase((37, 0, 15, 200), packing=PACKED_4),
    "8 bits in rings": DecodeCase((5, 95, 200), packing=PACKED_8, window=80, capacity=96),
    "8 bits, many queries": DecodeCase((37, 0, 300), packing=PACKED_8, size=128, count=5, capacity=512, span=128),
    "4 bits, several queries": DecodeCase((37, 0), packing=PACKED_4, size=128, count=2, span=128),
}
