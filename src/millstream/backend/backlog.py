"""Chunks of prompts beside running rows, evaluated by halves.

To write a chunk's launches down costs the host as much as two or three steps of the rows, whatever its length. MLX is
lazy, so a chunk can be built in one step and evaluated in two: the first half of its layers now, the rest in the next.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx


class Backlog:
    """Owner only. What is left of a chunk; whoever needs it sooner evaluates it by itself."""

    def __init__(self, *, halves: bool) -> None:
        self._halves = halves
        self._left: list[mx.array] = []

    def __bool__(self) -> bool:
        return bool(self._left)

    def clear(self) -> None:
        self._left = []

    def evaluate(self, arrays: Sequence[mx.array], *, beside: bool, whole: bool) -> None:
        """Evaluate what was left, or the first half of these arrays, which are in the layers' order; all if `whole`.

        With rows beside, their next read bounds how far Python runs ahead of the device; without, wait here.
        """
        due, half = [*self._left, *arrays], self._halves and beside and not whole and not self._left
        cut = -(-len(due) // 2) if half else len(due)
        due, self._left = due[:cut], due[cut:]
        if due:
            (mx.async_eval if beside else mx.eval)(due)
