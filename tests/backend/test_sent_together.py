"""What rows that join, move and leave write to slabs is sent in one evaluation: whatever order it runs in, every row
finds its own tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.backend.device import current_device
from millstream.backend.generation.caches.class_caches import ClassCaches
from millstream.backend.generation.caches.due import ALIGNED, Due
from millstream.backend.generation.caches.joining import JoiningRows
from millstream.backend.generation.caches.kernel_slabs import KernelStep
from millstream.backend.generation.caches.slabs import RowCache, Slab, SlabForm
from millstream.backend.generation.caches.widths import kernel_width, powers_of_two
from support.pointer_kernels import PointerKernels, check_items, memory, play_pointer_kernels
from support.tiers import examples

pytestmark = pytest.mark.skipif(
    current_device().kind != "cpu", reason="NumPy reads the memory of arrays: needs MLX's CPU device"
)

MAX_ROWS = 20
LAYERS = 2


class LaterKernels(PointerKernels):
    """Kernels that write when what is due is sent, the last one first: a device may run them in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Callable[[], object]] = []

    def join_rows(
        self, sources: Sequence[mx.array], places: Sequence[Sequence[int]], addresses: mx.array
    ) -> list[mx.array]:
        write = super().join_rows
        self.waiting.append(lambda: write(sources, places, addresses))
        return [mx.array([1])]

    def move_rows(self, moves: Sequence[Sequence[int]], addresses: mx.array, parts: Sequence[mx.array]) -> mx.array:
        write = super().move_rows
        self.waiting.append(lambda: write(moves, addresses, parts))
        return mx.array([1])

    def run(self) -> None:
        while self.waiting:
            self.waiting.pop()()


class Batch:
    """Rows whose token number n of row r has the key r * 100,000 + n and its negative as the value, in all layers."""

    def __init__(self, window: int) -> None:
        template = mx.zeros((1, 1, 1, 1))
        self.caches = ClassCaches(
            [(template, template)] * LAYERS, powers_of_two, width=kernel_width, kernels=True, window=window
        )
        self.names: list[int | None] = []
        self.started = 0

    @property
    def rows(self) -> dict[int, RowCache]:
        return {name: row for name, row in zip(self.names, self.caches.rows, strict=False) if name is not None and row}

    def join(self, lengths: list[int]) -> None:
        lengths = lengths[: MAX_ROWS - len(self.rows)]
        if not lengths:
            return
        names = range(self.started, self.started + len(lengths))
        self.started += len(lengths)
        flat, columns = [], []
        for name, length in zip(names, lengths, strict=True):
            flat.append((sum(part.shape[2] for part in columns), length))
            columns.append(_keys(name, 0, length))
        keys = mx.concatenate(columns, axis=2)
        numbers = self.caches.join([JoiningRows([(keys, -keys)] * LAYERS, (), flat=tuple(flat))])
        self.names += [None] * (len(self.caches.rows) - len(self.names))
        for number, name in zip(numbers, names, strict=True):
            self.names[number] = name

    def steps(self, count: int) -> None:
        for _ in range(count if self.rows else 0):
            self.caches.begin_step()
            self.check_items()
            for name, row in self.rows.items():
                key = name * 100_000.0 + row.length
                for parts in row.place.layers:
                    for part, value in zip(parts, (key, -key), strict=True):
                        memory(part)[row.slot, 0, row.own % row.place.capacity, 0] = value
            self.caches.end_step()

    def drop(self, chosen: list[int]) -> None:
        live = [number for number, name in enumerate(self.names) if name is not None]
        gone = {live[index % len(live)] for index in chosen} if live else set()
        kept = [number for number in live if number not in gone]
        order = self.caches.filter(kept)
        names = {number: self.names[number] for number in kept}
        self.names = [names.get(number) for number in order[: len(self.caches.rows)]]

    def keep(self, allowed: bool) -> None:
        self.caches.keep_vacant(allowed)

    def check_items(self) -> None:
        """Work items name each row's slab and slot, and the table has the addresses of its parts."""
        step = self.caches.step
        assert isinstance(step, KernelStep)
        items, table = np.array(step.work.items), np.array(step.work.addresses)
        check_items(items, self.caches.size, parted=step.work.parted)
        for number, row in enumerate(self.caches.rows):
            for item in items[items[:, 0] == number] if row is not None else ():
                assert item[2:4].tolist() == [row.slot, row.place.capacity] and item[8] == self.caches.window
                found = [[memory(part).ctypes.data for part in parts] for parts in row.place.layers]
                assert table[item[1]].tolist() == found

    def check(self) -> None:
        self.caches.due.send()
        for name, row in self.rows.items():
            expected = np.array(_keys(name, row.length - row.kept, row.length))
            for parts in row.place.layers:
                for part, sign in zip(parts, (1, -1), strict=True):
                    np.testing.assert_array_equal(np.array(self.caches._in_order(row, part)), sign * expected)


def _keys(name: int, start: int, stop: int) -> mx.array:
    return (name * 100_000.0 + mx.arange(start, stop)).reshape(1, 1, -1, 1)


LENGTHS = st.one_of(st.integers(1, 40), st.integers(250, 256), st.integers(500, 515), st.integers(760, 1100))
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.lists(LENGTHS, min_size=1, max_size=8)),
        st.tuples(st.just("drop"), st.lists(st.integers(0, MAX_ROWS), min_size=1, max_size=8)),
        st.tuples(st.just("steps"), st.integers(1, 12)),
        st.tuples(st.just("keep"), st.booleans()),
    ),
    max_size=14,
)


@pytest.mark.parametrize("window", [0, 300])
@given(operations=OPERATIONS)
@settings(max_examples=examples(200))
def test_no_order_of_writes_loses_a_token(window: int, operations: list[tuple[str, Any]]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        kernels = LaterKernels()
        play_pointer_kernels(monkeypatch, kernels)
        send = Due.send
        monkeypatch.setattr(Due, "send", lambda due: (kernels.run(), send(due)))
        batch = Batch(window)
        for name, argument in operations:
            getattr(batch, name)(argument)
        batch.check()


def test_what_a_move_reads_is_held_until_it_is_sent() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        kernels = LaterKernels()
        play_pointer_kernels(monkeypatch, kernels)
        send = Due.send
        monkeypatch.setattr(Due, "send", lambda due: (kernels.run(), send(due)))
        batch = Batch(0)
        batch.join([200] * 12)
        batch.steps(2)
        (shape,) = [buffer.shape for slab in batch.caches.slabs for buffer in slab.buffers]
        batch.drop([0, 1, 2, 3, 4, 5, 6, 7])
        assert kernels.waiting, "rows move"
        others = [mx.full(shape, 9.0) for _ in range(8)]  # they get what memory there is
        mx.eval(others)
        batch.check()


@pytest.fixture
def evaluations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many arrays each evaluation had."""
    play_pointer_kernels(monkeypatch, PointerKernels())
    found: list[int] = []
    evaluate = mx.async_eval

    def counted(*arrays: Any) -> None:
        found.append(len(arrays))
        evaluate(*arrays)

    monkeypatch.setattr(mx, "async_eval", counted)
    return found


def test_rows_join_and_leave_in_one_evaluation_each(evaluations: list[int]) -> None:
    batch = Batch(0)
    batch.keep(True)
    batch.join([20] * 5)
    batch.steps(3)
    assert len(evaluations) == 1
    batch.join([30] * 4)
    batch.steps(3)
    assert len(evaluations) == 2
    batch.drop([1, 4])
    batch.steps(3)
    assert len(evaluations) == 3
    batch.check()


def test_a_burst_ends_without_moves_and_leaves_nothing() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        kernels = PointerKernels()
        play_pointer_kernels(monkeypatch, kernels)
        batch = Batch(0)
        batch.keep(True)
        for count in (1, 6, 13):
            batch.join([20] * count)
            batch.steps(2)
        slabs = [id(slab) for slab in batch.caches.slabs]
        assert len(slabs) <= 3
        for gone in ([3], [0, 5, 6], [1, 2, 3, 4]):
            batch.drop(gone)
            batch.steps(2)
        assert "move_rows" not in kernels.calls and [id(slab) for slab in batch.caches.slabs] == slabs
        batch.keep(False)
        batch.check()
        rows = len(batch.rows)
        assert batch.caches.nbytes <= 16 * 256 * (rows + 4) and "move_rows" in kernels.calls
        batch.keep(True)
        batch.drop(list(range(rows)))
        assert batch.caches.nbytes == 0


def test_integers_travel_together() -> None:
    due = Due()
    first, second, third = due.integers([1, 2, 3, 4, 5], [7], np.array([8, 9], dtype=np.int32))
    (alone,) = due.integers([3])
    due.send()
    assert [each.tolist() for each in (first, second, third, alone)] == [
        [1, 2, 3, 4, 5, 0, 0, 0],
        [7, 0, 0, 0],
        [8, 9, 0, 0],
        [3, 0, 0, 0],
    ]
    assert all(each.size % ALIGNED == 0 for each in (first, second, third, alone))


@pytest.mark.parametrize("together", [True, False])
def test_parts_of_several_kinds_are_where_the_form_says(together: bool) -> None:
    """Keys and values of other sizes and types, as a quantised KV cache has them."""
    parts = (mx.zeros((1, 2, 1, 8), dtype=mx.uint32), mx.zeros((1, 2, 1, 4)), mx.zeros((1, 2, 1, 4)))
    slab = Slab(32, 3, SlabForm([(*parts, *parts)] * 3, together=together))
    assert len(slab.buffers) == (2 if together else 18)
    bases = [memory(buffer).ctypes.data for buffer in slab.buffers]
    arranged = zip(slab.arranged.which, slab.arranged.units, slab.arrays, strict=True)
    for number, (buffer, unit, part) in enumerate(arranged):
        assert part.shape == (3, 2, 32, 8 if number % 3 == 0 else 4)
        assert memory(part).ctypes.data == bases[buffer] + unit * 3 * 32
    assert slab.nbytes == sum(part.nbytes for part in slab.arrays)
