"""The states of a batch's recurrent and convolution layers: one array per state, with a row for each number.

A step replaces all of them, so a vacant row costs no more than its arithmetic. It goes on like a row whose tokens
nobody reads, from zeros or from what the last row left.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from millstream.backend.generation.caches.due import Due
from millstream.backend.generation.caches.pass_shape import PassShape
from millstream.backend.generation.caches.traced_step import Ref, TracedStep

States = Sequence[mx.array | None]
"""The states of one layer for some rows, (rows, …) each; None stands for zeros."""


class StateLayer(ArraysCache):  # type: ignore[misc]
    """One layer: mlx-lm's own cache, which for one token per row and without padding needs no more than its arrays. In
    a pass of several tokens it has the states of the rows in that pass."""

    cache: list[Any]

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.shape = PassShape(0, 0)
        self.steps: list[list[mx.array]] = []
        """The states after each token of such a pass."""
        self.whole: list[mx.array] = []
        """The states of all rows before it."""

    def begin(self, shape: PassShape) -> None:
        self.shape, self.steps = shape, []
        if shape.length > 1:
            self.whole = list(self.cache)
            self.cache = [array[: shape.live] for array in self.whole]
            self.steps = [list(self.cache) for _ in range(shape.length)]

    def keep(self, token: int, before: list[mx.array]) -> None:
        """Note the states after a token. Those that are what they were before belong to another module."""
        for entry, (old, new) in enumerate(zip(before, self.cache, strict=True)):
            if new is not old:
                self.steps[token][entry] = new

    def end(self, states: list[mx.array] | None) -> None:
        """These are the states of all rows, unless the pass has replaced them."""
        if states is not None:
            self.cache = states
        self.shape, self.steps, self.whole = PassShape(0, 0), [], []


class StateCaches(TracedStep):
    """Owner only. `templates`: per layer, states of one row. `due`: where changes go, which are not part of a step."""

    def __init__(self, templates: Sequence[States], due: Due | None = None) -> None:
        self._due = due or Due()
        self._templates = [[_template(array) for array in states] for states in templates]
        self.layers = [StateLayer(len(states)) for states in templates]
        self._size = 0

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for layer in self.layers for array in layer.cache if array is not None)

    def place(self, joining: Sequence[tuple[int, Sequence[States]]], numbers: list[int], size: int) -> None:
        """Add rows under these numbers, to a batch of `size`. `joining`: how many rows each has, and their states for
        each layer."""
        self._resize(size)
        for index, layer in enumerate(self.layers):
            for entry, like in enumerate(self._templates[index]):
                rows = [_rows(states[index][entry], count, like) for count, states in joining]
                new = rows[0] if len(rows) == 1 else mx.concatenate(rows)
                layer.cache[entry] = _written(layer.cache[entry], numbers, new)
        self._launch()

    def rearrange(self, order: list[int]) -> None:
        """Number the rows by `order`: the previous number of each."""
        if order == list(range(self._size)):
            return
        self._size = len(order)
        chosen = mx.array([max(0, number) for number in order], dtype=mx.int32)
        for layer in self.layers:
            layer.cache = [array[chosen] if order else None for array in layer.cache]
        if order:
            self._launch()

    def row(self, index: int) -> list[ArraysCache]:
        """The states of one row, per layer."""
        found: list[ArraysCache] = [layer.extract(index) for layer in self.layers]
        return found

    def _launch(self) -> None:
        self._due.add(*(array for layer in self.layers for array in layer.cache if array is not None))

    def _resize(self, size: int) -> None:
        grown, self._size = size - self._size, size
        if not grown:
            return
        for layer, templates in zip(self.layers, self._templates, strict=True):
            for entry, like in enumerate(templates):
                fresh = mx.zeros((grown, *like.shape[1:]), dtype=like.dtype)
                old = layer.cache[entry]
                layer.cache[entry] = fresh if old is None else mx.concatenate([old, fresh])

    def begin_step(self, shape: PassShape) -> None:
        for layer in self.layers:
            layer.begin(shape)

    def end_step(self, counts: Sequence[int] | None) -> None:
        """Each row has the states after so many of its new tokens; None: after all."""
        shape = self.layers[0].shape if self.layers else PassShape(0, 0)
        if shape.length == 1:
            return
        kept = [shape.length] * shape.live if counts is None else list(counts[: shape.live])
        states = states_after([layer.steps for layer in self.layers], [layer.whole for layer in self.layers], kept)
        for layer, found in zip(self.layers, states, strict=True):
            layer.end(found)

    def step_key(self) -> Hashable | None:
        return len(self.layers)

    def step_refs(self) -> list[Ref]:
        return [(layer.cache, entry) for layer in self.layers for entry in range(len(layer.cache))]

    def result_refs(self) -> list[Ref]:
        steps = [(step, entry) for layer in self.layers for step in layer.steps for entry in range(len(step))]
        return self.step_refs() + steps

    def forget_step(self) -> None:
        """The states are all that there is, and they were replaced."""


def states_after(
    steps: Sequence[Sequence[list[mx.array]]], whole: list[list[mx.array]], kept: Sequence[int]
) -> list[list[mx.array]]:
    """The states of each layer after so many tokens of each row. `steps`: by layer, those after each token; `whole`:
    of all rows before the pass."""
    distinct = sorted(set(kept))
    chosen = [[layer[count - 1] for count in distinct] for layer in steps]
    ends = mx.array(list(kept), dtype=mx.int32) >= mx.array(distinct, dtype=mx.int32)[:, None]
    pick = _picked if mx.default_device() == mx.Device(mx.DeviceType.cpu, 0) else _picked_compiled
    return pick(chosen, whole, ends)


def _picked(steps: list[list[list[mx.array]]], whole: list[list[mx.array]], ends: mx.array) -> list[list[mx.array]]:
    """For each layer and state, every row's array of `steps`: the last one for which its number in `ends` is true. Rows
    beyond those of the pass have what they had."""
    return [
        [_rows_of([step[entry] for step in found], old, ends) for entry, old in enumerate(states)]
        for found, states in zip(steps, whole, strict=True)
    ]


def _rows_of(found: list[mx.array], old: mx.array, ends: mx.array) -> mx.array:
    new = found[0]
    for index, later in enumerate(found[1:], start=1):
        new = mx.where(ends[index].reshape(-1, *[1] * (new.ndim - 1)), later, new)
    return new if old.shape[0] == new.shape[0] else mx.concatenate([new, old[new.shape[0] :]])


_picked_compiled = mx.compile(_picked)
"""One call for all layers. Not on the CPU, where it would be compiled by a C++ compiler."""


def _template(array: mx.array | None) -> mx.array:
    assert array is not None, "a layer without a state after its first token"
    return mx.zeros((1, *array.shape[1:]), dtype=array.dtype)


def _rows(states: mx.array | None, count: int, like: mx.array) -> mx.array:
    return mx.zeros((count, *like.shape[1:]), dtype=like.dtype) if states is None else states.astype(like.dtype)


def _written(array: mx.array, numbers: list[int], rows: mx.array) -> mx.array:
    if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        array[numbers[0] : numbers[-1] + 1] = rows
    else:
        array[mx.array(numbers, dtype=mx.int32)] = rows
    return array
