"""Rows that join a batch together, as the prefiller hands them over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, RotatingKVCache

from millstream.backend.generation.caches.slabs import Parts, SharedTokens
from millstream.backend.generation.prefix_store.cache_state import kv_parts


class Source(NamedTuple):
    """Where a row's tokens are in the arrays of `JoiningRows`."""

    row: int
    stop: int
    """The column after its last token."""


@dataclass(frozen=True, slots=True)
class JoiningRows:
    """Rows that were prefilled together: their parts per layer, and the padding columns of each.

    A window holds the last tokens only: a row of it has negative padding on its left.
    """

    layers: list[Parts]
    left_padding: tuple[int, ...]
    shared: tuple[SharedTokens, ...] = ()
    """The first tokens of a single row, if it goes on to read them in the prefix cache. `layers` has them too."""
    right_padding: tuple[int, ...] = ()
    """Of each row; none at all if empty."""
    skipped: int = 0
    """Tokens of a single row that were never read: it has no columns for them."""
    flat: tuple[tuple[int, int], ...] = ()
    """If all rows stand one after the other in a single row of the arrays: the first column of each, and its tokens.
    There is no padding then."""

    @property
    def columns(self) -> int:
        return self.layers[0][0].shape[2] if self.layers else 0

    @property
    def arrays(self) -> list[mx.array]:
        return [part for parts in self.layers for part in parts]

    @property
    def count(self) -> int:
        return len(self.flat or self.left_padding)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each row, read or skipped."""
        if self.flat:
            return tuple(tokens for _, tokens in self.flat)
        return tuple(self.stop(index) - padding + self.skipped for index, padding in enumerate(self.left_padding))

    def source(self, index: int) -> Source:
        """Where a row's tokens are."""
        if self.flat:
            return Source(0, sum(self.flat[index]))
        return Source(index, self.stop(index))

    def stop(self, index: int) -> int:
        """The column after a row's last token, in a row of its own."""
        return self.columns - (self.right_padding[index] if self.right_padding else 0)

    def take(self, indices: Sequence[int]) -> JoiningRows:
        """Some of the rows."""
        if list(indices) == list(range(self.count)):
            return self
        if self.flat:
            return replace(self, flat=tuple(self.flat[index] for index in indices))
        chosen = _chosen(indices)
        return replace(
            self,
            layers=[tuple(part[chosen] for part in parts) for parts in self.layers],
            left_padding=tuple(self.left_padding[index] for index in indices),
            right_padding=tuple(self.right_padding[index] for index in indices) if self.right_padding else (),
        )


def _chosen(indices: Sequence[int]) -> mx.array | slice:
    """Rows beside each other are taken without a copy."""
    first, count = min(indices, default=0), len(indices)
    beside = list(indices) == list(range(first, first + count))
    return slice(first, first + count) if beside else mx.array(list(indices), dtype=mx.int32)


def joining_row(caches: Sequence[Any], shared: tuple[SharedTokens, ...] = (), skipped: int = 0) -> JoiningRows:
    """One row that was prefilled into caches of its own."""
    layers = [kv_parts(cache) for cache in caches] if caches[0].keys is not None else []
    return JoiningRows(layers, (0,), shared, skipped=skipped)


def leaf_window(leaf: Any) -> int:
    """How many tokens a cache attends to; 0: all."""
    return int(leaf.max_size) if isinstance(leaf, RotatingKVCache) else 0


def layer_window(leaf: Any) -> int | None:
    """The same; None for a cache that keeps a state instead."""
    return None if isinstance(leaf, ArraysCache) else leaf_window(leaf)


@dataclass(frozen=True, slots=True)
class MixedRows:
    """Rows of a model whose layers are of several kinds, prefilled together."""

    attending: Mapping[int, JoiningRows]
    """By window, 0 for full attention."""
    states: Sequence[Sequence[mx.array | None]]
    """Per layer that has states: an array of (rows, …) for each; None for zeros."""
    count: int

    def take(self, indices: Sequence[int]) -> MixedRows:
        """Some of the rows."""
        if list(indices) == list(range(self.count)):
            return self
        chosen = _chosen(indices)
        states = [[None if array is None else array[chosen] for array in layer] for layer in self.states]
        attending = {window: rows.take(indices) for window, rows in self.attending.items()}
        return MixedRows(attending, states, len(indices))

    @property
    def arrays(self) -> list[mx.array]:
        found = [array for rows in self.attending.values() for array in rows.arrays]
        return found + [array for layer in self.states for array in layer if array is not None]


def mixed_rows(leaves: Sequence[Any], right_padding: Sequence[int] = (0,)) -> MixedRows:
    """Rows that were prefilled together into caches like those of one row; there may be more behind them, which nobody
    wants. Their tokens begin in the first column."""
    found: dict[int, list[Any]] = {}
    for leaf in leaves:
        if not isinstance(leaf, ArraysCache):
            found.setdefault(leaf_window(leaf), []).append(leaf)
    padding = tuple(right_padding)
    attending = {window: _joining_rows(window, same, padding) for window, same in found.items()}
    states = [_first_rows(leaf.cache, len(padding)) for leaf in leaves if isinstance(leaf, ArraysCache)]
    return MixedRows(attending, states, len(padding))


def _first_rows(states: Sequence[mx.array | None], count: int) -> list[mx.array | None]:
    """Without the rows that pad a pass."""
    return [array if array is None or array.shape[0] == count else array[:count] for array in states]


def _joining_rows(window: int, leaves: Sequence[Any], padding: tuple[int, ...]) -> JoiningRows:
    if leaves[0].keys is None:
        return JoiningRows([], (0,) * len(padding))
    layers = [window_parts(leaf) if window else kv_parts(leaf) for leaf in leaves]
    lost = leaves[0].offset - layers[0][0].shape[2]
    return JoiningRows(layers, (-lost,) * len(padding), right_padding=padding)


def window_parts(leaf: RotatingKVCache) -> Parts:
    """The tokens of a rotating cache, oldest first."""
    return leaf._temporal_order(leaf.keys), leaf._temporal_order(leaf.values)
