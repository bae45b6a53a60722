"""Spreads the evaluation of prefill chunks over several steps while rows are decoding.

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

    def append(self, arrays: Sequence[mx.array]) -> bool:
        """Evaluate these together with the last deferred part. False if nothing is deferred."""
        if self._remaining:
            self._remaining[-1].extend(arrays)
        return bool(self._remaining)

    def evaluate(
        self,
        passes: Sequence[Sequence[mx.array]],
        *,
        has_running_rows: bool,
        complete_now: bool,
        parts: int | None = None,
    ) -> None:
        """Evaluate, or start to evaluate, the arrays of new forward passes (in layer order) and the deferred ones.
        `parts`: in how many of the following steps, if not in `steps_per_chunk`.

        Evaluates everything now if `complete_now`, or if new passes arrive while others are deferred. Without running
        rows it waits for the result; with them, reading their next tokens bounds how far Python runs ahead of the
        device.
        """
        may_defer = has_running_rows and not complete_now and self._steps_per_chunk > 1
        if may_defer and any(passes) != bool(self._remaining):
            if not self._remaining:
                self._remaining = _split(passes, parts or self._steps_per_chunk)
                return
            due = self._remaining.pop(0)
        else:
            due = [array for part in (*self._remaining, *passes) for array in part]
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


def _split(passes: Sequence[Sequence[mx.array]], parts: int) -> list[list[mx.array]]:
    """Split into at most `parts` lists, none of them empty. Each has a share of every pass, so that a long pass after a
    short one does not fall into few steps."""
    found: list[list[mx.array]] = [[] for _ in range(parts)]
    for arrays in passes:
        length = -(-len(arrays) // parts)
        for part in range(parts):
            found[part] += arrays[part * length : (part + 1) * length]
    return [part for part in found if part]


def _first_element(array: mx.array) -> mx.array:
    """Something to wait for that does not hold the array."""
    return mx.sum(array[(slice(0, 1),) * array.ndim])
