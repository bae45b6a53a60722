"""What the layers of a model get as their caches: views of the rows that run in a pass, with mlx-lm's interface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from millstream.backend.generation.arena.columns import Columns
from millstream.backend.generation.arena.states import States


@dataclass(slots=True)
class Running:
    """What all layers read of the rows that run."""

    offset: mx.array
    """The position of each row's next token."""
    lengths: mx.array | None = None
    """In a padded pass: how many of its columns each row has."""
    unpadded: mx.array | None = None
    """In a padded pass: which columns of each row are tokens, (rows, columns)."""
    length: int = 1
    """Tokens per row of a pass of which rows keep some; 1: they keep all."""


@dataclass(frozen=True, slots=True)
class RowShape:
    """Of such a pass: what `PassShape` is where each token is a row of its own. Here rows are as they are."""

    live: int
    length: int

    @property
    def width(self) -> int:
        return self.live

    def by_row(self, x: mx.array, rows: int) -> mx.array:
        return x

    def flat_rows(self, x: mx.array) -> mx.array:
        return x


class KVView:
    """One attention layer. `number`: of the layer among those of its kind."""

    def __init__(self, running: Running, columns: Columns, number: int) -> None:
        self._running = running
        self.columns = columns
        self.number = number

    @property
    def offset(self) -> mx.array:
        return self._running.offset

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        return self.columns.mask(N, window_size or self.columns.window, as_array=return_array)

    def as_numbers(self, mask: mx.array, kind: mx.Dtype) -> mx.array:
        return self.columns.as_numbers(mask, kind)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        write, number = self.columns.write, 2 * self.number
        return write(number, keys), write(number + 1, values)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        columns, number = self.columns, 2 * self.number
        return columns.view(columns.parts[number]), columns.view(columns.parts[number + 1])

    state = property(keys_and_values)

    @property
    def arrays(self) -> list[mx.array]:
        """All that it holds, in the order in which a pass writes it."""
        parts, number = self.columns.parts, 2 * self.number
        return [parts[each] for each in (number, number + 1) if each in parts]

    def _part(self, part: int) -> mx.array | None:
        return self.columns.parts.get(2 * self.number + part)

    def _set(self, part: int, value: mx.array) -> None:
        self.columns.parts[2 * self.number + part] = value

    # Two families read and replace these themselves.
    keys = property(lambda self: self._part(0), lambda self, value: self._set(0, value))
    values = property(lambda self: self._part(1), lambda self, value: self._set(1, value))

    def empty(self) -> bool:
        return self._part(0) is None

    def size(self) -> int:
        return self.columns.live

    def is_trimmable(self) -> bool:
        return False


class StateView:
    """One recurrent layer."""

    left_padding = None

    def __init__(self, running: Running, states: States) -> None:
        self._running = running
        self.states = states

    @property
    def shape(self) -> RowShape:
        return RowShape(self.states.rows, self._running.length)

    @property
    def steps(self) -> list[list[Any]]:
        return self.states.steps

    @steps.setter
    def steps(self, found: list[list[Any]]) -> None:
        self.states.steps = found

    def keep(self, token: int, before: list[Any]) -> None:
        self.states.keep(token, before)

    @property
    def cache(self) -> list[mx.array | None]:
        return self.states.entries

    state = cache

    @property
    def arrays(self) -> list[mx.array]:
        return self.states.arrays

    def __getitem__(self, index: int) -> mx.array | None:
        return self.states.entries[index]

    def __setitem__(self, index: int, value: mx.array) -> None:
        self.states.entries[index] = value

    @property
    def lengths(self) -> mx.array | None:
        """Of the rows in this pass; None: all of it."""
        return self._running.lengths

    @property
    def offset(self) -> mx.array:
        return self._running.offset

    def make_mask(self, N: int, **_: Any) -> mx.array | None:
        return self._running.unpadded

    def advance(self, count: int) -> None:
        """Lengths are those of one pass."""

    def empty(self) -> bool:
        return self.states.entries[0] is None

    def is_trimmable(self) -> bool:
        return False


class ListView:
    """A layer with several caches."""

    def __init__(self, views: Sequence[Any]) -> None:
        self.caches = tuple(views)

    def __getitem__(self, index: int) -> Any:
        return self.caches[index]

    @property
    def arrays(self) -> list[mx.array]:
        return [array for each in self.caches for array in each.arrays]

    def empty(self) -> bool:
        return bool(self.caches[0].empty())

    @property
    def state(self) -> list[Any]:
        return [each.state for each in self.caches]
