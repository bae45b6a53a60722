"""Chunks of prompts beside running rows, evaluated in parts.

To write a chunk's launches down costs the host as much as several steps of the rows, much the same for 200 tokens and
for 500. MLX is lazy, so a chunk is built in one step and evaluated in those after it, some layers in each.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

PARTS = 4


class Backlog:
    """Owner only. What is left of a chunk; whoever needs it sooner evaluates it by itself."""

    def __init__(self, *, parts: int) -> None:
        """`parts`: how many steps a chunk is evaluated in, besides the one that builds it. 1: in that one."""
        self._parts = parts
        self._left: list[list[mx.array]] = []

    def __bool__(self) -> bool:
        return bool(self._left)

    def clear(self) -> None:
        self._left = []

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
        if due:
            (mx.async_eval if beside else mx.eval)(due)


def _cut(arrays: Sequence[mx.array], parts: int) -> list[list[mx.array]]:
    """Into at most so many lists, none of them empty."""
    length = -(-len(arrays) // parts)
    return [list(arrays[start : start + length]) for start in range(0, len(arrays), length)]
