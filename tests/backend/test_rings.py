"""Rows of a sliding window live in rings: whatever joins, grows and leaves, each finds its last tokens."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.backend.generation.caches.class_caches import ClassCaches
from millstream.backend.generation.caches.joining import JoiningRows
from millstream.backend.generation.caches.widths import exact, powers_of_two
from millstream.backend.generation.layers import attention
from millstream.engine.generation.kv_capacity import RING_SLACK, SMALLEST, SPARE_TOKENS, ring_capacity
from support.pointer_kernels import PointerKernels, play_pointer_kernels
from support.tiers import examples

MAX_ROWS = 12


class Rows:
    """Rows of one layer whose token number n of row r has the key 1,000 r + n + 1, and its negative as the value."""

    def __init__(self, window: int, *, kernels: bool) -> None:
        self.window = window
        template = mx.zeros((1, 1, 1, 1))
        policy = powers_of_two if kernels else exact
        self.caches = ClassCaches([(template, template)], policy, kernels=kernels, window=window)
        self.names: list[int | None] = []
        self.lengths: dict[int, int] = {}
        self.kernels = kernels

    def join(self, lengths: list[int], spare: int) -> None:
        """`spare`: columns before and after the tokens in what was prefilled."""
        lengths = lengths[: MAX_ROWS - len(self.lengths)]
        if not lengths:
            return
        names = range(max(self.lengths, default=0) + 1, max(self.lengths, default=0) + 1 + len(lengths))
        columns = max(lengths) + spare
        padded = mx.zeros((len(lengths), 1, columns, 1))
        for index, (name, length) in enumerate(zip(names, lengths, strict=True)):
            padded[index, 0, :length, 0] = self.keys(name, 0, length)
        rows = JoiningRows(
            [(padded, -padded)] if columns else [],
            (0,) * len(lengths),
            right_padding=tuple(columns - length for length in lengths),
        )
        numbers = self.caches.join([rows])
        self.names += [None] * (len(self.caches.rows) - len(self.names))
        for number, name, length in zip(numbers, names, lengths, strict=True):
            self.names[number] = name
            self.lengths[name] = length

    def join_rotated(self, length: int) -> None:
        """One row whose window has lost its first tokens."""
        name = max(self.lengths, default=0) + 1
        first = max(0, length - self.window)
        keys = self.keys(name, first, length).reshape(1, 1, -1, 1)
        rows = JoiningRows([(keys, -keys)], (-first,))
        assert rows.lengths == (length,)
        (number,) = self.caches.join([rows])
        self.names += [None] * (len(self.caches.rows) - len(self.names))
        self.names[number] = name
        self.lengths[name] = length

    def step(self) -> mx.array | None:
        """One token per row, with attention."""
        if not self.lengths:
            return None
        self.caches.begin_step()
        new = mx.zeros((self.caches.size, 1, 1, 1))
        for number, name in enumerate(self.names):
            if name is not None:
                new[number, 0, 0, 0] = self.keys(name, self.lengths[name], self.lengths[name] + 1)[0]
        layer = self.caches.layers[0]
        keys, values = layer.update_and_fetch(new, -new)
        attend = attention.kernel_attention if self.kernels else attention.attention
        out = attend(mx.zeros_like(new), keys, values, layer, 1.0, layer.make_mask(1, window_size=self.window))
        mx.eval(out)
        self.caches.end_step()
        self.lengths = {name: length + 1 for name, length in self.lengths.items()}
        return out

    def drop(self, chosen: list[int]) -> None:
        live = [number for number, name in enumerate(self.names) if name is not None]
        gone = {live[index % len(live)] for index in chosen} if live else set()
        kept = [number for number in live if number not in gone]
        names = [name if number in kept else None for number, name in enumerate(self.names)]
        order = self.caches.filter(kept)
        self.names = [names[number] if number >= 0 else None for number in order]
        self.lengths = {name: self.lengths[name] for name in self.names if name is not None}

    def check(self, out: mx.array | None = None) -> None:
        for number, name in enumerate(self.names):
            if name is None:
                continue
            length = self.lengths[name]
            expected = np.array(self.keys(name, max(0, length - self.window), length))
            (row,) = self.caches.window_row(number)
            assert row.offset == length
            if length:
                np.testing.assert_array_equal(np.array(row.keys)[0, 0, :, 0], expected)
                np.testing.assert_array_equal(np.array(row.values)[0, 0, :, 0], -expected)
            if out is not None:  # queries are zero, so attention is the mean of what it sees
                assert np.array(out)[number, 0, 0, 0] == pytest.approx(-expected.mean(), rel=1e-4)
        assert not self.caches.lost_writes()
        capacity = max(ring_capacity(self.window), SMALLEST if self.window > SMALLEST else 0)
        assert self.caches.nbytes / 8 <= (2 * MAX_ROWS * capacity if self.kernels else 1.5 * MAX_ROWS * capacity) + 4096

    @staticmethod
    def keys(name: int, start: int, stop: int) -> mx.array:
        return name * 1000.0 + mx.arange(start, stop) + 1


LENGTHS = st.one_of(st.integers(0, 12), st.integers(20, 90), st.integers(250, 330))
OPERATIONS: Any = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.lists(LENGTHS, min_size=1, max_size=4), st.integers(0, 3)),
        st.tuples(st.just("join_rotated"), st.integers(1, 400)),
        st.tuples(st.just("drop"), st.lists(st.integers(0, MAX_ROWS), min_size=1, max_size=6)),
        st.tuples(st.just("step"), st.integers(1, 50)),
    ),
    max_size=8,
)


def run(window: int, operations: list[tuple[Any, ...]], *, kernels: bool) -> None:
    rows = Rows(window, kernels=kernels)
    for name, *arguments in operations:
        if name == "step":
            out = None
            for _ in range(arguments[0]):
                out = rows.step()
            rows.check(out)
        elif name != "join_rotated" or len(rows.lengths) < MAX_ROWS:
            getattr(rows, name)(*arguments)
            rows.check()


@given(st.sampled_from([8, 64, 300]), OPERATIONS)
@settings(max_examples=examples(30))
def test_rows_find_their_last_tokens(window: int, operations: list[tuple[Any, ...]]) -> None:
    run(window, operations, kernels=False)


@given(st.sampled_from([8, 300]), OPERATIONS)
@settings(max_examples=examples(15))
def test_rows_find_their_last_tokens_with_kernels(window: int, operations: list[tuple[Any, ...]]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        play_pointer_kernels(monkeypatch, PointerKernels())
        run(window, operations, kernels=True)


def test_a_short_row_takes_a_short_slot_of_a_long_window() -> None:
    rows = Rows(4096, kernels=False)
    rows.join([10] * 8, 0)
    assert rows.caches.nbytes / 8 <= 8 * SMALLEST + SPARE_TOKENS
    rows.join_rotated(9000)
    rows.step()
    rows.check()
    assert ring_capacity(4096) == 4096 + RING_SLACK
    (place,) = {row.place.capacity for row in rows.caches.rows if row is not None and row.length > 4096}
    assert place == ring_capacity(4096)
