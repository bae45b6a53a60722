"""The KV cache of a head: one layer, the last tokens of each row, in one rectangle of rings.

A head needs little context: the hidden state that it reads has seen all of it. So a row has at most `WINDOW` pairs,
its memory is bounded, and shapes stay the same. Columns beyond a row's length hold rejected tokens and padding: they
are never visible, and the next tokens overwrite them.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

WINDOW = 1024
SLACK = 64
"""Columns for what a proposal writes behind a row's tokens: as many of the oldest are not visible."""
FIRST_COLUMNS = 128


class HeadCache:
    """Owner only. Rows have slots; `begin` chooses those of a pass, and the block then calls it like a cache of
    mlx-lm."""

    def __init__(self) -> None:
        self.parts: list[mx.array] = []
        self.offset = mx.zeros((0,), dtype=mx.int32)
        self.mask = mx.zeros((0,), dtype=mx.bool_)
        self._lengths: list[int] = []
        """How many pairs each slot has seen; -1: vacant."""
        self._columns = FIRST_COLUMNS
        self._chosen: mx.array | None = None
        self._at = mx.zeros((0,), dtype=mx.int32)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def join(self, prompt: Sequence[mx.array] = ()) -> int:
        """A slot for a row. `prompt`: keys and values (1, heads, tokens, size) of its last prompt tokens."""
        slot = self._lengths.index(-1) if -1 in self._lengths else len(self._lengths)
        if slot == len(self._lengths):
            self._lengths.append(-1)
            self.parts = [mx.concatenate([part, mx.zeros_like(part[:1])]) for part in self.parts]
        tokens = prompt[0].shape[2] if prompt else 0
        assert tokens <= WINDOW - SLACK, "more of a prompt than the window holds"
        self._lengths[slot] = tokens
        if tokens:
            self._grow(tokens + SLACK)
            self._allocate(prompt)
            for part, new in zip(self.parts, prompt, strict=True):
                part[slot : slot + 1, :, :tokens] = new
        return slot

    def leave(self, slot: int) -> None:
        self._lengths[slot] = -1
        while self._lengths and self._lengths[-1] == -1:
            self._lengths.pop()
        if len(self._lengths) < (self.parts[0].shape[0] if self.parts else 0):
            self.parts = [part[: len(self._lengths)] * 1 for part in self.parts] if self._lengths else []
        if not self._lengths:
            self._columns = FIRST_COLUMNS

    def begin(self, slots: Sequence[int], length: int, ahead: int = 0) -> None:
        """Prepare a pass of so many tokens for these slots, `ahead` tokens behind what they hold."""
        lengths = [self._lengths[slot] + ahead for slot in slots]
        assert length + ahead <= SLACK, "a pass writes more than the slack"
        self._grow(max(lengths) + length + SLACK)
        everyone = list(slots) == list(range(len(self._lengths)))
        self._chosen = None if everyone else mx.array(list(slots), dtype=mx.int32)
        self.offset = mx.array(lengths, dtype=mx.int32)
        queries = self.offset[:, None] + mx.arange(length)
        self._at = queries % self._columns
        last = (self.offset + (length - 1))[:, None]
        # The position that each column holds; negative where it holds none.
        held = last - (last - mx.arange(self._columns)) % self._columns
        visible = (held >= 0) & (held > last + (SLACK - self._columns))
        self.mask = (visible[:, None, :] & (held[:, None, :] <= queries[:, :, None]))[:, None]

    def commit(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        """Keep the first so many tokens that were written behind each row's own."""
        for slot, count in zip(slots, counts, strict=True):
            self._lengths[slot] += count

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the tokens of the pass. Returns the keys and values of its rows."""
        new = (keys, values)
        self._allocate(new)
        read = []
        for index, part in enumerate(self.parts):
            rows = part if self._chosen is None else part[self._chosen]
            at = mx.broadcast_to(self._at[:, None, :, None], new[index].shape)
            rows = mx.put_along_axis(rows, at, new[index], axis=2)
            if self._chosen is None:
                self.parts[index] = rows
            else:
                part[self._chosen] = rows
            read.append(rows)
        return read[0], read[1]

    def _allocate(self, like: Sequence[mx.array]) -> None:
        if not self.parts:
            shapes = [(len(self._lengths), each.shape[1], self._columns, each.shape[3]) for each in like]
            self.parts = [mx.zeros(shape, dtype=each.dtype) for shape, each in zip(shapes, like, strict=True)]

    def _grow(self, columns: int) -> None:
        """Columns for the longest row, until the window is full: from then on they are rings."""
        wanted = self._columns
        while wanted < min(columns, WINDOW):
            wanted = min(2 * wanted, WINDOW)
        if wanted > self._columns:
            more = [(0, 0), (0, 0), (0, wanted - self._columns), (0, 0)]
            self.parts = [mx.pad(part, more) for part in self.parts]
            self._columns = wanted
