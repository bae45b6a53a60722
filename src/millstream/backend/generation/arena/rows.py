"""Rows that run together: what a forward pass of a model reads and writes, in arenas and states.

A pass over prompts has many columns, a decode step has one. A cached prefix is one row, so to restore it is to join.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, ConcatenateKVCache, KVCache, RotatingKVCache

from millstream.backend.generation.arena.columns import NOTHING, Columns
from millstream.backend.generation.arena.states import States
from millstream.backend.generation.arena.views import KVView, ListView, Running, StateView
from millstream.backend.generation.caches.batch_caches import RowCaches
from millstream.backend.generation.caches.state_caches import states_after
from millstream.backend.generation.prefix_store.blocks import PrefixStore
from millstream.backend.generation.prefix_store.cache_state import leaf_caches
from millstream.backend.generation.prefix_store.serialize import Layers
from millstream.engine.prefix_cache.orders import SavePrefix

MOST_GAPS = 8
"""Gaps are closed where they are more than one of so many columns."""


def misfit(caches: RowCaches) -> str | None:
    """Why a model's layers cannot have arenas, as far as their caches tell."""
    for leaf in leaf_caches(caches):
        if type(leaf) not in (KVCache, ConcatenateKVCache, RotatingKVCache, ArraysCache):
            return f"{type(leaf).__name__} has no arena"
        if isinstance(leaf, RotatingKVCache) and leaf.keep:
            return "a window that keeps its first tokens has no arena"
    return None


class Rows:
    """Owner only. `like`: mlx-lm's caches of one row, which may be empty; none of them is a `misfit`."""

    def __init__(self, like: RowCaches) -> None:
        self._like = like
        self.kinds: dict[int, Columns] = {}
        """By window, 0 for full attention."""
        self.states: list[States] = []
        self.tokens: list[int] = []
        """How many each row has computed."""
        self._running = Running(mx.zeros((0,), dtype=mx.int32))
        self._begun = 0
        self._queries = self._running.offset
        layers: dict[int, int] = {}
        self.layers = [self._view(cache, layers) for cache in like]
        """What the model's layers get as their caches."""

    def _view(self, cache: Any, layers: dict[int, int]) -> Any:
        if isinstance(cache, CacheList):
            return ListView([self._view(each, layers) for each in cache.caches])
        if isinstance(cache, ArraysCache):
            self.states.append(States(len(cache.cache)))
            return StateView(self._running, self.states[-1])
        window = _window(cache)
        columns = self.kinds.setdefault(window, Columns(window))
        layers[window] = layers.get(window, -1) + 1
        return KVView(self._running, columns, layers[window])

    def empty(self) -> Rows:
        """No rows, for the same model."""
        return Rows(self._like)

    @property
    def size(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.kinds.values()) + sum(
            array.nbytes for each in self.states for array in each.arrays
        )

    @property
    def arrays(self) -> list[mx.array]:
        """All that a pass writes, in layer order."""
        return [*(array for view in self.layers for array in view.arrays), *self.marks]

    @property
    def marks(self) -> list[mx.array]:
        """What a pass changes and no layer may read: where nothing evaluates it, it grows from pass to pass."""
        return [self._running.offset, *(each.positions for each in self.kinds.values())]

    # A pass.

    def begin_some(self, count: int) -> None:
        """Begin a pass of `count` tokens per row, of which each row keeps some."""
        self.begin(count)
        if count > 1:
            self._running.length = count
            for states in self.states:
                states.begin(count)

    def begin(self, count: int, lengths: Sequence[int] | None = None, more: int = 0) -> None:
        """Begin a pass of `count` columns. `lengths`: how many of them are tokens of each row, at least one; None: all
        of them. `more`: about how many follow in later passes."""
        if lengths is not None and min(lengths) == count:
            lengths = None
        steps = mx.arange(count, dtype=mx.int32) if count > 1 else None
        queries = self._running.offset[:, None] if steps is None else self._running.offset[:, None] + steps
        self._running.lengths = self._running.unpadded = None
        if lengths is not None and steps is not None:
            self._running.lengths = mx.array(list(lengths), dtype=mx.int32)
            self._running.unpadded = steps < self._running.lengths[:, None]
            queries = mx.where(self._running.unpadded, queries, NOTHING)
        self._begun, self._queries = count, queries
        for columns in self.kinds.values():
            columns.reserve(count, more)
            columns.begin(count, queries)

    def end(self, counts: Sequence[int] | None = None) -> None:
        """End the pass. `counts`: how many of its tokens each row keeps; None: all of them, in a padded pass as many
        as it had."""
        count, kept, used = self._begun, None, self._running.lengths
        if counts is None:
            counts = [count] * self.size
        elif used is None and min(counts) < count:
            used = mx.array(list(counts), dtype=mx.int32)
            kept = mx.where(mx.arange(count, dtype=mx.int32) < used[:, None], self._queries, NOTHING)
        for columns in self.kinds.values():
            columns.end(counts, kept)
        self._running.offset = self._running.offset + (count if used is None else used)
        self.tokens = [tokens + count for tokens, count in zip(self.tokens, counts, strict=True)]
        self._running.lengths = self._running.unpadded = None
        if self._running.length > 1:
            self._running.length = 1
            steps, before = [each.steps for each in self.states], [each.before for each in self.states]
            for states, found in zip(self.states, states_after(steps, before, counts), strict=True):
                states.end(found)

    def run(self, model: Callable[..., mx.array], tokens: mx.array, lengths: Sequence[int], more: int = 0) -> mx.array:
        """A whole pass over prompts, in which all tokens stay."""
        self.begin(tokens.shape[1], lengths, more)
        logits = model(tokens, cache=self.layers)
        self.end(lengths)
        return logits

    # Rows.

    def add(self, caches: RowCaches | None = None, tokens: int = 0, room: int = 0) -> int:
        """Append a row from mlx-lm's caches of it, which hold so many tokens; None: an empty one. `room`: how many
        follow. Returns its number."""
        self.join(None if caches is None else _of_caches(self.empty(), caches, tokens), [0], room)
        return self.size - 1

    def join(self, other: Rows | None, rows: Sequence[int], room: int = 0) -> list[int]:
        """Append rows of others; None: empty ones. Returns their numbers."""
        for window, columns in self.kinds.items():
            columns.join(None if other is None else other.kinds[window], rows, room if not window else 0)
        for number, states in enumerate(self.states):
            states.join(None if other is None else other.states[number], rows)
        found = [0 if other is None else other.tokens[row] for row in rows]
        self._running.offset = mx.concatenate([self._running.offset, mx.array(found, dtype=mx.int32)])
        self.tokens += found
        return list(range(self.size - len(rows), self.size))

    def set_tokens(self, tokens: int) -> None:
        """The only row holds so many."""
        self.tokens, self._running.offset = [tokens], mx.array([tokens], dtype=mx.int32)

    def take(self, keep: Sequence[int]) -> None:
        """Have these rows alone."""
        for columns in self.kinds.values():
            columns.take(keep)
        for states in self.states:
            states.take(keep)
        self._running.offset = self._running.offset[mx.array(list(keep), dtype=mx.int32)]
        self.tokens = [self.tokens[row] for row in keep]

    def forget(self, row: int) -> None:
        """Nobody reads this row any more. It goes on in every pass, until it is left out."""
        for columns in self.kinds.values():
            columns.forget(row)

    def close_gaps(self) -> None:
        for columns in self.kinds.values():
            if MOST_GAPS * max(columns.gap, default=0) > columns.live:
                columns.close_gaps()

    def save(self, row: int, order: SavePrefix, store: PrefixStore) -> list[mx.array]:
        """Save a prefix of a row that has computed at least so many tokens, and just as many for a checkpoint. Evaluate
        the arrays it returns before the next pass."""
        full = self.kinds.get(0)

        def tokens(start: int, stop: int) -> Layers:
            return [] if full is None else _pairs(full.tokens(row, start, stop))

        others = [] if order.checkpoint is None else self._states_of(row)
        return store.save_tokens(order, tokens, others)

    def _states_of(self, row: int) -> list[Any]:
        """A row's part of what cannot be cut at any token, as mlx-lm's caches of one row."""
        states, windows = iter(self.states), {}
        for window, each in self.kinds.items():
            windows[window] = iter(_pairs(each.tokens(row, 0, each.reach[row] - each.gap[row])) if window else ())
        found: list[Any] = []
        for leaf in leaf_caches(self._like):
            if isinstance(leaf, ArraysCache):
                found.append(_state_row(next(states), row))
            elif window := _window(leaf):
                found.append(_window_row(window, next(windows[window]), self.tokens[row]))
        return found


def _window(leaf: Any) -> int:
    return int(leaf.max_size) if isinstance(leaf, RotatingKVCache) else 0


def _pairs(parts: Sequence[mx.array]) -> Layers:
    return list(zip(parts[::2], parts[1::2], strict=True))


def _state_row(states: States, row: int) -> ArraysCache:
    found = ArraysCache(len(states.entries))
    found.cache = [None if each is None else each[row : row + 1] for each in states.entries]
    return found


def _window_row(window: int, parts: tuple[mx.array, ...], length: int) -> RotatingKVCache:
    """The last tokens of a row of so many, as mlx-lm's cache of one row. That counts on a whole window, of which no
    later token sees the oldest column: arenas do not hold it."""
    missing = min(window, length) - parts[0].shape[2]
    found = RotatingKVCache(window)
    found.keys, found.values = (mx.pad(each, [(0, 0), (0, 0), (missing, 0), (0, 0)]) for each in parts)
    found.offset, found._idx = length, found.keys.shape[2]
    return found


def _of_caches(rows: Rows, caches: RowCaches, tokens: int) -> Rows:
    """One row, from mlx-lm's caches of it."""
    rows.join(None, [0])
    states = iter(rows.states)
    found: dict[int, list[mx.array]] = {window: [] for window in rows.kinds}
    for leaf in leaf_caches(caches):
        if isinstance(leaf, ArraysCache):
            next(states).entries = list(leaf.cache)
        elif leaf.keys is not None and tokens:
            parts = leaf.keys_and_values() if not _window(leaf) else map(leaf._temporal_order, (leaf.keys, leaf.values))
            found[_window(leaf)] += parts
    for window, columns in rows.kinds.items():
        if parts := found[window]:
            columns.fill(parts, tokens)
    rows.set_tokens(tokens)
    return rows
