"""Chunks of prompts beside running rows, evaluated in parts.

To write a chunk's launches down costs the host as much as several steps of the rows, much the same for 200 tokens and
for 500. MLX is lazy, so a chunk is built in one step and evaluated in those after it, some layers in each.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

PARTS = 4


class DeferredChunks:
    """Owner only. What is left of a chunk; whoever needs it sooner evaluates it by itself."""

    def __init__(self, *, parts: int, in_turn: bool) -> None:
        """`parts`: how many steps a chunk is evaluated in, besides the one that builds it. 1: in that one. `in_turn`:
        begin with a chunk when the last one is done. MLX writes to a buffer in place only if no work that is under way
        reads it, and else copies all of it: the keys and values of the whole prompt."""
        self._parts = parts
        self._in_turn = in_turn
        self._last: mx.array | None = None
        self._left: list[list[mx.array]] = []

    def __bool__(self) -> bool:
        return bool(self._left)

    def clear(self) -> None:
        self._left = []
        self._last = None

    def evaluate(self, arrays: Sequence[mx.array], *, beside: bool, whole: bool) -> None:
        """Evaluate these arrays and what was left, or begin to: they are in the layers' order. All now if `whole`, or
        if a chunk comes while another one is left.

        With rows beside, their next read bounds how far Python runs ahead of the device; without, wait here.
        """
        if beside and not whole and self._parts > 1 and bool(arrays) != bool(self._left):
            if arrays:
                self._left = _cut(arrays, self._parts)
                return
            due = self._left.pop(0)
        else:
            due = [*(array for part in self._left for array in part), *arrays]
            self._left = []
        if not due:
            return
        if not beside:
            mx.eval(due)
        elif self._in_turn:
            if self._last is not None:
                mx.eval([self._last])
            self._last = _first_number(due[-1])
            mx.async_eval([*due, self._last])  # type: ignore[no-untyped-call]
        else:
            mx.async_eval(due)  # type: ignore[no-untyped-call]


def _cut(arrays: Sequence[mx.array], parts: int) -> list[list[mx.array]]:
    """Into at most so many lists, none of them empty."""
    length = -(-len(arrays) // parts)
    return [list(arrays[start : start + length]) for start in range(0, len(arrays), length)]


def _first_number(array: mx.array) -> mx.array:
    """To be waited for, without holding the array."""
    return mx.sum(array[(slice(0, 1),) * array.ndim])
