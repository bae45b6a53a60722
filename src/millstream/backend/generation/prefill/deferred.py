"""Spreads the evaluation of prefill chunks over several steps while rows are decoding.

Encoding a chunk's launches costs the host as much as several decode steps, and about the same for 200 tokens as for
500. MLX is lazy, so a chunk is evaluated some layers at a time. A pass in parts is also built so, from the step on that
has it planned; any other is built in that step, and evaluated in the following ones. Copies that save a prompt are
spread in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from millstream.backend.generation.prefill.pass_in_parts import PassInParts

STEPS_PER_CHUNK = 4

SAVING_PARTS = 2
"""Steps that evaluate the copies of a saved prompt: an array each for keys and values of every layer."""

BEGINNING = 0.5
"""The share of layers, relative to other steps, that a step builds and evaluates in which a pass in parts begins: to
call the model for its stand-ins takes the host about as long as the rest of the share."""

PARTS_ALONE = 2
"""Parts of a pass without rows beside it: the device begins with one while the host builds the other."""

Pass = Sequence[mx.array] | PassInParts
"""A forward pass: its arrays, in layer order, or what builds them."""

Piece = mx.array | Callable[[], list[mx.array]]
"""What is to be evaluated, or what builds that."""


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
        self._remaining: list[list[Piece]] = []
        self._saves: list[Piece] = []
        self._only_saves = False
        """True if what remains are copies of saved prompts alone."""

    def __bool__(self) -> bool:
        """True while chunks remain."""
        return bool(self._remaining) and not self._only_saves

    @property
    def saving(self) -> bool:
        """True while copies of saved prompts remain, but no chunk."""
        return bool(self._remaining) and self._only_saves

    @property
    def defers(self) -> bool:
        """False if each chunk is evaluated in one step."""
        return self._steps_per_chunk > 1

    def clear(self) -> None:
        self._remaining = []
        self._saves = []
        self._previous = None

    def append(self, arrays: Sequence[mx.array]) -> bool:
        """Evaluate these copies of a saved prompt with the last deferred part, since it may compute what they copy, or
        in the steps that follow. False if nothing is ever deferred."""
        if self:
            self._remaining[-1].extend(arrays)
        elif self.defers:
            self._saves += arrays
        return self.defers

    def evaluate(
        self,
        passes: Sequence[Pass],
        *,
        has_running_rows: bool,
        complete_now: bool,
        parts: int | None = None,
    ) -> None:
        """Evaluate, or start to evaluate, new forward passes and the deferred ones. `parts`: in how many of the
        following steps, if not in `steps_per_chunk`.

        Evaluates everything now if `complete_now`, or if new passes arrive while others are deferred. Without running
        rows it waits for the result; with them, reading their next tokens bounds how far Python runs ahead of the
        device.
        """
        may_defer = has_running_rows and not complete_now and self.defers
        if may_defer and not (any(passes) and self):
            self._defer(passes, parts or self._steps_per_chunk)
            due = self._remaining.pop(0) if self._remaining else []
        else:
            pieces = PARTS_ALONE if not has_running_rows else 1
            new = (each.split(pieces) if isinstance(each, PassInParts) else each for each in passes)
            due = [piece for part in (*self._remaining, *new, self._saves) for piece in part]
            self._remaining, self._saves = [], []
        if due:
            self._start(due, wait=not has_running_rows)

    def _defer(self, passes: Sequence[Pass], parts: int) -> None:
        """Spread new passes and copies over this step and those that follow."""
        saves, self._saves = self._saves, []
        if any(passes):
            saves = [*(piece for part in self._remaining for piece in part), *saves]
            begins = all(isinstance(each, PassInParts) for each in passes if each)
            self._remaining = _split(passes, parts + 1, BEGINNING) if begins else [[], *_split(passes, parts)]
            self._only_saves = False
            copies = _split([saves], max(1, len(self._remaining) - 1))
            for part, some in zip(reversed(self._remaining), copies, strict=False):
                part += some
        elif saves:
            if not self._remaining:
                self._remaining = [[]]  # to build them was enough for this step
            self._remaining += _split([saves], SAVING_PARTS)
            self._only_saves = True

    def _start(self, due: Sequence[Piece], *, wait: bool) -> None:
        arrays: list[mx.array] = []
        for piece in due:
            if not callable(piece):
                arrays.append(piece)
                continue
            built = piece()
            arrays += built
            if wait and built and not self._wait_for_previous:
                mx.async_eval(built)  # type: ignore[no-untyped-call]
        if not arrays:
            return
        if wait:
            mx.eval(arrays)
        elif self._wait_for_previous:
            if self._previous is not None:
                mx.eval([self._previous])
            self._previous = _first_element(arrays[-1])
            mx.async_eval([*arrays, self._previous])  # type: ignore[no-untyped-call]
        else:
            mx.async_eval(arrays)  # type: ignore[no-untyped-call]


def _split(passes: Sequence[Pass | Sequence[Piece]], parts: int, beginning: float = 1.0) -> list[list[Piece]]:
    """Split into at most `parts` lists, none of them empty. Each has a share of every pass, so that a long pass after a
    short one does not fall into few steps. `beginning`: the share of the first one, relative to the others."""
    found: list[list[Piece]] = [[] for _ in range(parts)]
    for each in passes:
        if isinstance(each, PassInParts):
            for part, build in zip(found, each.split(parts, beginning), strict=False):
                part.append(build)
            continue
        length = -(-len(each) // parts)
        for number, part in enumerate(found):
            part += each[number * length : (number + 1) * length]
    return [part for part in found if part]


def _first_element(array: mx.array) -> mx.array:
    """Something to wait for that does not hold the array."""
    return mx.sum(array[(slice(0, 1),) * array.ndim])
