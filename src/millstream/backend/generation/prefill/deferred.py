"""Spreads the evaluation of a prefill chunk over several steps while rows are decoding.

Encoding a chunk's launches costs the host as much as several decode steps, and about the same for 200 tokens as for
500. MLX is lazy, so a chunk is built in one step and evaluated in the following ones, some layers in each.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

STEPS_PER_CHUNK = 4


class DeferredChunks:
    """Owner only. The part of a chunk that is not evaluated yet. Code that needs it sooner simply evaluates it."""

    def __init__(self, *, steps_per_chunk: int, wait_for_previous: bool) -> None:
        """`steps_per_chunk`: how many steps evaluate a chunk, after the one that builds it; with 1, the step that
        builds a chunk evaluates it too. `wait_for_previous`: start a chunk only when the previous one is done. MLX
        writes to a buffer in place only if no running work reads it, and otherwise copies it: here, the KV cache of
        the whole prompt."""
        self._steps_per_chunk = steps_per_chunk
        self._wait_for_previous = wait_for_previous
        self._previous: mx.array | None = None
        self._remaining: list[list[mx.array]] = []

    def __bool__(self) -> bool:
        return bool(self._remaining)

    def clear(self) -> None:
        self._remaining = []
        self._previous = None

    def evaluate(self, arrays: Sequence[mx.array], *, has_running_rows: bool, complete_now: bool) -> None:
        """Evaluate, or start to evaluate, a new chunk's `arrays` (in layer order) and the deferred ones.

        Evaluates everything now if `complete_now`, or if a new chunk arrives while another is deferred. Without
        running rows it waits for the result; with them, reading their next tokens bounds how far Python runs ahead of
        the device.
        """
        may_defer = has_running_rows and not complete_now and self._steps_per_chunk > 1
        if may_defer and bool(arrays) != bool(self._remaining):
            if arrays:
                self._remaining = _split(arrays, self._steps_per_chunk)
                return
            due = self._remaining.pop(0)
        else:
            due = [*(array for part in self._remaining for array in part), *arrays]
            self._remaining = []
        if not due:
            return
        if not has_running_rows:
            mx.eval(due)
        elif self._wait_for_previous:
            if self._previous is not None:
                mx.eval([self._previous])
            self._previous = _first_element(due[-1])
            mx.async_eval([*due, self._previous])  # type: ignore[no-untyped-call]
        else:
            mx.async_eval(due)  # type: ignore[no-untyped-call]


def _split(arrays: Sequence[mx.array], parts: int) -> list[list[mx.array]]:
    """Split into at most `parts` lists, none of them empty."""
    length = -(-len(arrays) // parts)
    return [list(arrays[start : start + length]) for start in range(0, len(arrays), length)]


def _first_element(array: mx.array) -> mx.array:
    """Something to wait for that does not hold the array."""
    return mx.sum(array[(slice(0, 1),) * array.ndim])
