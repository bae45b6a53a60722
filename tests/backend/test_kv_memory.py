"""The memory of length classes follows the tokens, and no token is lost, whatever joins, grows and leaves."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.backend.generation.caches.class_caches import ClassCaches
from millstream.backend.generation.caches.joining import JoiningRows
from millstream.backend.generation.caches.slabs import RowCache
from millstream.backend.generation.caches.widths import exact, powers_of_two
from millstream.engine.generation.kv_capacity import KEPT_TOKENS, SMALLEST, SPARE_TOKENS, kv_capacity
from support.pointer_kernels import PointerKernels, play_pointer_kernels
from support.tiers import examples

MAX_ROWS = 24
CONSTANT = MAX_ROWS * SMALLEST + 4 * SPARE_TOKENS
"""In tokens: a row takes at least the smallest class, and the classes up to `SPARE_TOKENS` may have vacant slots."""

LENGTHS = st.one_of(st.integers(0, 40), st.integers(200, 1100), st.integers(1000, 9000), st.just(30_000))


class Batch:
    """Rows of one layer whose token number n of row r has the key r * 100,000 + n and its negative as the value."""

    def __init__(self, kernels: bool) -> None:
        template = mx.zeros((1, 1, 1, 1))
        self.caches = ClassCaches([(template, template)], powers_of_two if kernels else exact, kernels=kernels)
        self.names: list[int | None] = []
        self.started = 0
        self.kept = 0

    @property
    def rows(self) -> dict[int, RowCache]:
        return {name: row for name, row in zip(self.names, self.caches.rows, strict=False) if name is not None and row}

    def join(self, lengths: list[int]) -> None:
        lengths = lengths[: MAX_ROWS - len(self.rows)]
        if not lengths:
            return
        names = range(self.started, self.started + len(lengths))
        self.started += len(lengths)
        joining = []
        for name, length in zip(names, lengths, strict=True):
            keys = self._keys(name, 0, length)
            joining.append(JoiningRows([(keys, -keys)] if length else [], (0,)))
        numbers = self.caches.join(joining)
        self.names += [None] * (len(self.caches.rows) - len(self.names))
        for number, name in zip(numbers, names, strict=True):
            self.names[number] = name

    def step(self) -> None:
        if not self.rows:
            return
        self.caches.begin_step()
        columns = [
            mx.zeros((1, 1, 1, 1)) if name is None or row is None else self._keys(name, row.length, row.length + 1)
            for name, row in zip(self.names, self.caches.rows, strict=True)
        ]
        new = mx.concatenate(columns)
        for read in self.caches.step.reads:
            read.write(0, (new, -new))
        self.caches.end_step()

    def drop(self, chosen: list[int]) -> None:
        live = [number for number, name in enumerate(self.names) if name is not None]
        gone = {live[index % len(live)] for index in chosen} if live else set()
        kept = [number for number in live if number not in gone]
        order = self.caches.filter(kept)
        names = [name if number in kept else None for number, name in enumerate(self.names)]
        self.names = [names[number] if number >= 0 else None for number in order]

    def keep(self, vacant: list[int]) -> None:
        """Whether slots may stay vacant, which is another constant."""
        self.kept = vacant[0]
        self.caches.keep_vacant(bool(self.kept))

    def check_memory(self) -> None:
        tokens = sum(row.length for row in self.rows.values())
        assert self.caches.nbytes / 8 <= 1.5 * tokens + CONSTANT + self.kept
        assert self.rows or not self.caches.nbytes

    def check_tokens(self) -> None:
        for name, row in self.rows.items():
            keys, values = row.place.layers[0]
            for part, sign in ((keys, 1), (values, -1)):
                held = np.array(part[row.slot, 0, : row.length, 0])
                np.testing.assert_array_equal(held, sign * np.array(self._keys(name, 0, row.length))[0, 0, :, 0])

    @staticmethod
    def _keys(name: int, start: int, stop: int) -> mx.array:
        return (name * 100_000.0 + mx.arange(start, stop)).reshape(1, 1, -1, 1)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.lists(LENGTHS, min_size=1, max_size=6)),
        st.tuples(st.just("drop"), st.lists(st.integers(0, MAX_ROWS), min_size=1, max_size=8)),
        st.tuples(st.just("steps"), st.integers(1, 60)),
        st.tuples(st.just("keep"), st.sampled_from([[0], [KEPT_TOKENS]])),
    ),
    max_size=14,
)


def run(operations: list[tuple[str, list[int] | int]], *, kernels: bool) -> Batch:
    batch = Batch(kernels)
    for name, argument in operations:
        if isinstance(argument, int):
            for _ in range(argument):
                batch.step()
                batch.check_memory()
        else:
            getattr(batch, name)(argument)
        batch.check_memory()
    return batch


@given(OPERATIONS)
@settings(max_examples=examples(40))
def test_memory_follows_the_tokens(operations: list[tuple[str, list[int] | int]]) -> None:
    run(operations, kernels=False).check_tokens()


@given(OPERATIONS)
@settings(max_examples=examples(20))
def test_memory_follows_the_tokens_with_kernels(operations: list[tuple[str, list[int] | int]]) -> None:
    """The steps of kernels write elsewhere: this is about slots."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        play_pointer_kernels(monkeypatch, PointerKernels())
        run(operations, kernels=True)


def test_one_long_row_beside_many_short_ones() -> None:
    """The case that a rectangle took 15 times the memory for."""
    batch = Batch(kernels=False)
    batch.join([4000] * 6)
    batch.join([100] * 17)
    batch.join([60_000])
    tokens = 24_000 + 1700 + 60_000
    assert batch.caches.nbytes / 8 < 1.2 * tokens
    batch.step()
    batch.check_tokens()


def test_a_row_that_joins_moves_no_long_row() -> None:
    batch = Batch(kernels=False)
    batch.join([9000])
    before = [id(slab) for slab in batch.caches.slabs]
    batch.join([20] * 5)
    batch.step()
    batch.drop([2])
    assert before[0] in [id(slab) for slab in batch.caches.slabs]
    batch.check_tokens()


@given(st.integers(1, 300_000))
def test_a_class_wastes_at_most_a_fifth_of_a_long_buffer(tokens: int) -> None:
    assert tokens <= kv_capacity(tokens)
    assert kv_capacity(tokens) - tokens < max(SMALLEST, tokens / 4)
    assert kv_capacity(kv_capacity(tokens)) == kv_capacity(tokens)
