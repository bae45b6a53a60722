"""Rows that keep some of the tokens of a pass: whatever was written and not kept, attention and saves never see it.

One layer with random keys and values, in length classes or rings, with shared prefixes, by MLX's operations and by the
kernels' way; every pass is compared with the formula over the tokens that a row has kept.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.backend.generation.caches.class_caches import ClassCaches
from millstream.backend.generation.caches.joining import JoiningRows
from millstream.backend.generation.caches.slabs import SharedTokens
from millstream.backend.generation.caches.widths import exact, kernel_width, powers_of_two
from millstream.backend.generation.layers import attention
from millstream.backend.generation.prefix_store.blocks import PrefixStore
from millstream.engine.generation.speculation.lengths import LENGTHS
from millstream.engine.prefix_cache.orders import SavePrefix
from support.pointer_kernels import PointerKernels, play_pointer_kernels
from support.tiers import examples

GROUPS, SHARE, SIZE, MAX_ROWS, BLOCK = 2, 2, 4, 6, 16


class RaggedRows:
    """Rows by name, with all keys and values that each has kept."""

    def __init__(self, window: int, *, kernels: bool) -> None:
        template = mx.zeros((1, GROUPS, 1, SIZE))
        policy, width = (powers_of_two, kernel_width) if kernels else (exact, None)
        self.caches = ClassCaches([(template, template)], policy, width=width, kernels=kernels, window=window)
        self.window, self.kernels = window, kernels
        self.random = np.random.default_rng(5)
        prefix = self._numbers(40)
        self.prefix = prefix
        self.shared = SharedTokens([tuple(mx.array(part) for part in prefix)], 8, 32)
        self.names: list[int | None] = []
        self.kept: dict[int, list[Any]] = {}

    def _numbers(self, tokens: int) -> list[Any]:
        """Keys and values of one row."""
        return [self.random.normal(size=(1, GROUPS, tokens, SIZE)).astype(np.float32) for _ in range(2)]

    def join(self, length: int, shared: bool) -> None:
        if len(self.kept) >= MAX_ROWS:
            return
        name = max(self.kept, default=0) + 1
        tokens = self._numbers(length)
        pieces: tuple[SharedTokens, ...] = ()
        if shared and not self.window:
            tokens = [
                np.concatenate([old[:, :, 8:40], new], axis=2) for old, new in zip(self.prefix, tokens, strict=True)
            ]
            pieces = (self.shared,)
        rows = JoiningRows(
            [tuple(mx.array(part) for part in tokens)] if tokens[0].shape[2] else [], (0,), shared=pieces
        )
        (number,) = self.caches.join([rows])
        self.names += [None] * (len(self.caches.rows) - len(self.names))
        self.names[number] = name
        self.kept[name] = tokens

    def drop(self, index: int) -> None:
        live = [number for number, name in enumerate(self.names) if name is not None]
        if not live:
            return
        gone = live[index % len(live)]
        del self.kept[self.names[gone]]  # type: ignore[arg-type]
        order = self.caches.filter([number for number in live if number != gone])
        names = [None if number == gone else name for number, name in enumerate(self.names)]
        self.names = [names[number] if 0 <= number < len(names) else None for number in order]

    def step(self, length: int, counts: list[int]) -> None:
        """One pass; rows keep these counts of it, in turn."""
        if not self.kept:
            return
        caches = self.caches
        caches.begin_step(length)
        shape = caches.shape
        new = [self.random.normal(size=(shape.rows, GROUPS, length, SIZE)).astype(np.float32) for _ in range(2)]
        queries = self.random.normal(size=(shape.rows, GROUPS * SHARE, length, SIZE)).astype(np.float32)
        flat = [shape.flattened(mx.array(each)) for each in (queries, *new)]
        layer = caches.layers[0]
        assert layer.offset.shape == (shape.width,)
        keys, values = layer.update_and_fetch(flat[1], flat[2])
        attend = attention.kernel_attention if self.kernels else attention.attention
        out = attend(flat[0], keys, values, layer, 0.5, layer.make_mask(1, window_size=self.window or None))
        assert out.shape == flat[0].shape
        got = np.array(shape.grouped(out))
        kept = [1] * caches.size
        for number, name in enumerate(self.names):
            if name is not None:
                kept[number] = min(length, counts[number % len(counts)])
                self._compare(name, number, queries, new, got, kept[number])
        caches.end_step(kept)
        for number, name in enumerate(self.names):
            if name is not None:
                fresh = [part[number : number + 1, :, : kept[number]] for part in new]
                pairs = zip(self.kept[name], fresh, strict=True)
                self.kept[name] = [np.concatenate(pair, axis=2) for pair in pairs]

    def _compare(self, name: int, number: int, queries: Any, new: list[Any], got: Any, count: int) -> None:
        """Only the queries of tokens that are kept: those after them follow on from garbage."""
        before = self.kept[name][0].shape[2]
        for token in range(count):
            end = before + token + 1
            start = max(0, end - self.window) if self.window else 0
            keys, values = (
                np.concatenate([old, fresh[number : number + 1]], axis=2)[0, :, start:end]
                for old, fresh in zip(self.kept[name], new, strict=True)
            )
            query = queries[number, :, token].reshape(GROUPS, SHARE, SIZE)
            scores = np.einsum("hgd,hkd->hgk", query, keys) * 0.5
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            wanted = np.einsum("hgk,hkd->hgd", weights / weights.sum(axis=-1, keepdims=True), values)
            np.testing.assert_allclose(got[number, :, token], wanted.reshape(-1, SIZE), atol=2e-5)

    def check(self) -> None:
        """What is saved of a row is what it has kept."""
        for number, name in enumerate(self.names):
            if name is None:
                continue
            tokens = self.kept[name][0].shape[2]
            if self.window:
                (row,) = self.caches.window_row(number)
                assert row.offset == tokens
                if tokens:
                    for part, kept in zip((row.keys, row.values), self.kept[name], strict=True):
                        np.testing.assert_array_equal(np.array(part), kept[:, :, max(0, tokens - self.window) :])
                continue
            blocks = tokens // BLOCK
            if not blocks:
                continue
            store = PrefixStore()
            handles = tuple(range(blocks))
            mx.eval(self.caches.save(number, SavePrefix(1, 0, BLOCK, handles, None, blocks * BLOCK), store))
            saved = [piece.layers[0] for piece in store.share(handles, 1)]
            for part in range(2):
                found = np.concatenate([np.array(each[part]) for each in saved], axis=2)
                np.testing.assert_array_equal(
                    found[:, :, : blocks * BLOCK], self.kept[name][part][:, :, : blocks * BLOCK]
                )


JOIN = st.tuples(st.just("join"), st.one_of(st.integers(1, 12), st.integers(236, 260)), st.booleans())
STEP = st.tuples(
    st.just("step"), st.sampled_from(LENGTHS), st.lists(st.integers(1, 17), min_size=1, max_size=4), st.integers(1, 3)
)
DROP = st.tuples(st.just("drop"), st.integers(0, 9))
OPERATIONS: Any = st.lists(st.one_of(JOIN, STEP, STEP, DROP), min_size=3, max_size=14)


def run(window: int, operations: list[tuple[Any, ...]], *, kernels: bool) -> None:
    rows = RaggedRows(window, kernels=kernels)
    rows.join(250, shared=True)
    for name, *arguments in operations:
        if name == "step":
            length, counts, times = arguments
            for _ in range(times):
                rows.step(length, counts)
        else:
            getattr(rows, name)(*arguments)
        rows.check()


@given(st.sampled_from([0, 8, 300]), OPERATIONS)
@settings(max_examples=examples(60), deadline=None)
def test_rows_see_what_they_kept(window: int, operations: list[tuple[Any, ...]]) -> None:
    run(window, operations, kernels=False)


@given(st.sampled_from([0, 8, 300]), OPERATIONS)
@settings(max_examples=examples(40), deadline=None)
def test_rows_see_what_they_kept_with_kernels(window: int, operations: list[tuple[Any, ...]]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        play_pointer_kernels(monkeypatch, PointerKernels())
        run(window, operations, kernels=True)


@pytest.mark.parametrize("kernels", [False, True])
def test_a_draft_that_crosses_a_length_class(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its row moves before the pass, and stays there although it keeps one token."""
    if kernels:
        play_pointer_kernels(monkeypatch, PointerKernels())
    rows = RaggedRows(0, kernels=kernels)
    rows.join(250, shared=False)
    rows.join(3, shared=False)
    rows.step(9, [1, 9])
    assert [row.place.capacity for row in rows.caches.rows if row is not None] == [512, 256]
    for _ in range(4):
        rows.step(9, [4, 1])
    rows.check()
