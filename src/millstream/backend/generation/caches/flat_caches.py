"""Caches of a flat pass: whole prompts one after the other, each token a row of its own.

As in a pass that verifies drafts, linear layers, experts and rotary embeddings are those of a wide decode step; only
attention and short convolutions know which tokens belong together. Nothing is padded but the end of the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from millstream.backend.generation.caches.slabs import Parts


class FlatPrompts:
    """Shared by the layers of a pass, (tokens,) each: the position of every token in its prompt, and the flat row of
    its prompt's first token. Rows that pad the pass see themselves alone."""

    def __init__(self, positions: mx.array, firsts: mx.array) -> None:
        self.positions = positions
        self.firsts = firsts
        self._masks: dict[int, mx.array] = {}

    def mask(self, window: int) -> mx.array:
        """True for what a token sees, (tokens, tokens): for attention that has to be told."""
        if window not in self._masks:
            every = mx.arange(self.firsts.shape[0])
            seen = (every <= every[:, None]) & (every >= self.firsts[:, None])
            self._masks[window] = seen & (every > every[:, None] - window) if window else seen
        return self._masks[window]


class FlatCache:
    """One layer of a flat pass, with the interface that mlx-lm's attention layers expect of a cache. `window`: a token
    attends to so many of the last ones, itself included; 0: to all."""

    def __init__(self, prompts: FlatPrompts, window: int = 0) -> None:
        self.prompts = prompts
        self.window = window
        self.offset = prompts.positions
        self._parts: Parts = ()

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> None:
        """No mask: attention knows what a token sees. Raises `ValueError` if a layer wants another window."""
        if N != 1 or (window_size or self.window) != self.window:
            raise ValueError("its layers do not attend to all tokens of their cache")

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self._parts:
            raise ValueError("a flat cache takes one pass")
        self._parts = (keys, values)
        return keys, values

    @property
    def parts(self) -> Parts:
        """What the pass has written, (1, heads, tokens, any) each."""
        return tuple(side_by_side(part) for part in self._parts)

    def attend(
        self, attend: Callable[..., mx.array], queries: mx.array, keys: mx.array, values: mx.array, **named: Any
    ) -> mx.array:
        """Have `attend` compute what is one row of tokens to it."""
        out = attend(*(side_by_side(each) for each in (queries, keys, values)), **named)
        return out.swapaxes(0, 2)


class FlatPackedCache(FlatCache):
    """The same of a quantised KV cache: attention reads what was packed."""

    def __init__(self, prompts: FlatPrompts, *, bits: int, group_size: int) -> None:
        super().__init__(prompts)
        self._bits, self._group_size = bits, group_size

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self._parts:
            raise ValueError("a flat cache takes one pass")
        packed = [mx.quantize(each, group_size=self._group_size, bits=self._bits) for each in (keys, values)]
        self._parts = tuple(part for parts in packed for part in parts)
        keys, values = (mx.dequantize(*parts, group_size=self._group_size, bits=self._bits) for parts in packed)
        return keys, values


class FlatStates:
    """One layer of a flat pass whose state is the last columns that went into it: a short convolution. What else a
    module may want to do with a state raises `AttributeError` or `TypeError`."""

    def __init__(self, prompts: FlatPrompts) -> None:
        self.prompts = prompts
        self.offset = prompts.positions
        self._columns: mx.array | None = None

    def make_mask(self, N: int) -> None:
        """No mask: a convolution is told where its prompts begin."""

    def write(self, columns: mx.array) -> None:
        """All that went in, (tokens, channels), behind as many columns of zeros as a state has."""
        if self._columns is not None:
            raise ValueError("a flat cache takes one pass")
        self._columns = columns

    @property
    def parts(self) -> Parts:
        if self._columns is None:
            raise ValueError("no short convolution has used its state")
        return (self._columns,)


def states_after(columns: mx.array, tokens: int, places: Sequence[tuple[int, int]]) -> mx.array:
    """The states, (prompts, kept, channels), after prompts that stand at these places, (first column, length) each, in
    a pass of so many tokens. `columns`: what `FlatStates` has after it. A prompt shorter than its state begins with
    zeros."""
    kept = columns.shape[0] - tokens
    behind = [range(first + length, first + length + kept) for first, length in places]
    chosen = [
        [column if column >= first + kept else 0 for column in each]
        for each, (first, _) in zip(behind, places, strict=True)
    ]
    # What comes from a list is in the host's memory: without a copy the device would read it from there.
    return columns[mx.array(chosen, dtype=mx.int32) + 0]


def fits_flat_pass(cache: Any) -> bool:
    """True if a cache of one row has a form in a flat pass: full attention, a plain window, or what may be the state of
    a short convolution."""
    if type(cache) is ArraysCache:
        return len(cache.cache) == 1
    return type(cache) is KVCache or (type(cache) is RotatingKVCache and not cache.keep)


def side_by_side(heads: mx.array) -> mx.array:
    """From (tokens, heads, 1, any) to (1, heads, tokens, any), without a copy."""
    return heads.swapaxes(0, 2)
