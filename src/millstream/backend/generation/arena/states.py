"""The states of recurrent and convolution layers: an array for each entry of a layer, a row of it for each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx


class States:
    """Owner only. One layer's. None: nothing was written yet, which is the same as zeros."""

    def __init__(self, entries: int, rows: int = 0) -> None:
        self.entries: list[mx.array | None] = [None] * entries
        self.rows = rows
        self.steps: list[list[Any]] = []
        """In a pass of which rows keep some tokens: the states after each of them."""
        self.before: list[Any] = []
        """Those before such a pass."""

    def begin(self, length: int) -> None:
        """Begin a pass of `length` tokens per row, of which each row keeps some."""
        self.before = list(self.entries)
        self.steps = [list(self.entries) for _ in range(length)]

    def keep(self, token: int, before: Sequence[mx.array | None]) -> None:
        """Note the states after a token. Those that are what they were before belong to another module."""
        for entry, (old, new) in enumerate(zip(before, self.entries, strict=True)):
            if new is not old:
                self.steps[token][entry] = new

    def end(self, entries: Sequence[mx.array]) -> None:
        self.entries = list(entries)
        self.steps, self.before = [], []

    @property
    def arrays(self) -> list[mx.array]:
        return [each for each in self.entries if each is not None]

    def take(self, keep: Sequence[int]) -> None:
        chosen = mx.array(list(keep), dtype=mx.int32)
        self.entries = [None if each is None else each[chosen] for each in self.entries]
        self.rows = len(keep)

    def join(self, other: States | None, rows: Sequence[int]) -> None:
        """Append rows of another batch; None: new ones."""
        whole = other is not None and list(rows) == list(range(other.rows))
        chosen = None if whole else mx.array(list(rows), dtype=mx.int32)

        def joined(held: mx.array | None, source: mx.array | None) -> mx.array | None:
            like = held if source is None else source
            if like is None:
                return None
            if source is None:
                source = mx.zeros((len(rows), *like.shape[1:]), dtype=like.dtype)
            elif chosen is not None:
                source = source[chosen]
            if not self.rows:
                return source
            if held is None:
                held = mx.zeros((self.rows, *like.shape[1:]), dtype=like.dtype)
            return mx.concatenate([held, source])

        theirs = [None] * len(self.entries) if other is None else other.entries
        self.entries = [joined(held, source) for held, source in zip(self.entries, theirs, strict=True)]
        self.rows += len(rows)
