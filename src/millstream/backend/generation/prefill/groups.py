"""Whole prompts that were prefilled in one padded forward pass, until their rows join the batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, RotatingKVCache

from millstream.backend.generation.caches.batch_caches import RowCaches, cache_arrays, new_row_caches
from millstream.backend.generation.caches.joining import JoiningRows, MixedRows, leaf_window, mixed_rows
from millstream.backend.generation.caches.prompt_caches import (
    PaddedCache,
    PaddedPackedCache,
    Padding,
    begin_right_padding,
    end_right_padding,
    repeat_row,
)
from millstream.backend.generation.caches.quantized import KvQuantization
from millstream.backend.generation.prefill.flat import FlatPasses
from millstream.backend.generation.prefill.pass_in_parts import LayersInParts, PassInParts
from millstream.backend.generation.prefix_store.blocks import PrefixStore
from millstream.backend.generation.prefix_store.cache_state import is_sliceable, kv_parts, leaf_caches
from millstream.backend.generation.prefix_store.serialize import Layers
from millstream.engine.generation.messages import Generate
from millstream.engine.prefix_cache.orders import SavePrefix


class Group:
    """Their rows usually join together; otherwise they are gathered."""

    def __init__(self, submits: Sequence[Generate]) -> None:
        self.members: list[Generate | None] = list(submits)
        self.begun: PassInParts | None = None
        """The pass, if it is built in parts and nobody has needed all of it yet."""

    @functools.cached_property
    def rows(self) -> JoiningRows | MixedRows:
        """Of all members. A pass in parts is built to its end for them."""
        raise NotImplementedError

    @property
    def arrays(self) -> list[mx.array]:
        """What is built of the pass, in layer order."""
        return self.rows.arrays

    def columns(self, index: int) -> slice:
        """Where the pass had a member's tokens, before anybody was taken."""
        raise NotImplementedError

    def take(self, wanted: set[int]) -> tuple[list[Generate], Any]:
        """The members among these, and their rows if there are any."""
        chosen = [index for index, member in enumerate(self.members) if member and member.request_id in wanted]
        members = [member for member in (self.members[index] for index in chosen) if member is not None]
        return members, self.rows.take(chosen) if members else None

    def discard(self, ids: set[int]) -> None:
        self.members = [None if member and member.request_id in ids else member for member in self.members]
        if not any(self.members):
            self.members = []
            if self.begun is not None:
                self.begun.cancel()

    def save(self, order: SavePrefix, store: PrefixStore) -> list[mx.array] | None:
        """Save blocks of a member. Evaluate the arrays it returns; None if the request is no member."""
        for index, member in enumerate(self.members):
            if member is not None and member.request_id == order.request_id:
                return self._save(index, order, store)
        return None

    def _save(self, index: int, order: SavePrefix, store: PrefixStore) -> list[mx.array] | None:
        raise NotImplementedError

    def _build_rest(self) -> None:
        """Of a pass in parts: its caches are wanted."""
        if self.begun is not None:
            self.begun.build_rest()
            self.begun = None


class LeftPaddedGroup(Group):
    """For full attention: tokens end in the same column."""

    rows: JoiningRows

    def __init__(
        self, model: Any, layer_count: int, submits: Sequence[Generate], packing: KvQuantization | None = None
    ) -> None:
        lengths = [len(submit.prompt) - 1 for submit in submits]
        longest = max(lengths)
        left_padding = tuple(longest - length for length in lengths)
        shared = Padding(left_padding)
        caches = [_padded_cache(shared, packing) for _ in range(layer_count)]
        padded = [[0] * pad + list(submit.prompt[:-1]) for pad, submit in zip(left_padding, submits, strict=True)]
        model(mx.array(padded, dtype=mx.int32), cache=caches)
        parts = [cache.parts if isinstance(cache, PaddedPackedCache) else kv_parts(cache) for cache in caches]
        super().__init__(submits)
        self.rows = JoiningRows(parts, left_padding)

    def columns(self, index: int) -> slice:
        return slice(self.rows.left_padding[index], None)

    def _save(self, index: int, order: SavePrefix, store: PrefixStore) -> list[mx.array]:
        start = self.rows.left_padding[index] + order.first * order.block
        stop = start + len(order.handles) * order.block
        layers = [tuple(part[index : index + 1, :, start:stop] for part in parts) for parts in self.rows.layers]
        return store.save(order.handles, layers, order.export_id)


class FlatGroup(Group):
    """For full attention, where passes can be flat: tokens stand one after the other."""

    rows: JoiningRows

    def __init__(self, passes: FlatPasses, submits: Sequence[Generate]) -> None:
        parts, self._places = passes.run([submit.prompt[:-1] for submit in submits])
        super().__init__(submits)
        self.rows = JoiningRows(parts, (), flat=self._places)

    def _save(self, index: int, order: SavePrefix, store: PrefixStore) -> list[mx.array]:
        start = self._places[index][0] + order.first * order.block
        stop = start + len(order.handles) * order.block
        layers = [tuple(part[:, :, start:stop] for part in parts) for parts in self.rows.layers]
        return store.save(order.handles, layers, order.export_id)


class FlatMixedGroup(Group):
    """The same for models that have layers with sliding windows, or short convolutions, whose states are known."""

    rows: MixedRows

    def __init__(self, passes: FlatPasses, submits: Sequence[Generate]) -> None:
        self._parts, self._places = passes.run([submit.prompt[:-1] for submit in submits])
        self._windows = passes.windows
        windows = {window for window in passes.windows if window is not None}
        attending = {window: JoiningRows(self._layers(window), (), flat=self._places) for window in windows}
        super().__init__(submits)
        self.rows = MixedRows(attending, self._layers(None), len(self._places))

    @property
    def arrays(self) -> list[mx.array]:
        return [part for parts in self._parts for part in parts]

    def _layers(self, window: int | None) -> Layers:
        return [parts for parts, each in zip(self._parts, self._windows, strict=True) if each == window]

    def _save(self, index: int, order: SavePrefix, store: PrefixStore) -> list[mx.array] | None:
        first, length = self._places[index]
        if order.checkpoint is not None and order.tokens != length:
            return None

        def tokens(start: int, stop: int) -> Layers:
            return [tuple(part[:, :, first + start : first + stop] for part in parts) for parts in self._layers(0)]

        others: list[Any] = []
        for parts, window in zip(self._parts, self._windows, strict=True):
            if window is None:
                others.append(_state_row([part[index : index + 1] for part in parts]))
            elif window:
                columns = slice(first + max(0, length - window), first + length)
                others.append(_window_row(window, [part[:, :, columns] for part in parts], length))
        return store.save_tokens(order, tokens, others)


class RightPaddedGroup(Group):
    """For layers of several kinds, into caches like those of one row: tokens begin in the first column, so that a
    causal mask is all that attention needs, and states are told where their row ends."""

    def __init__(
        self,
        model: Any,
        submits: Sequence[Generate],
        padded_length: Callable[[int], int],
        padded_rows: Callable[[int], int] = int,
        layers: LayersInParts | None = None,
        start: int = 0,
        fill: Callable[[RowCaches], None] | None = None,
    ) -> None:
        """`padded_length`: the length of a pass for some tokens. `padded_rows`: its rows for some prompts. `layers`: if
        this pass is to be built in parts. `start`: the tokens of the prefix that all prompts continue, which `fill`
        puts into caches of one row."""
        super().__init__(submits)
        self._start = start
        self._lengths = [len(submit.prompt) - 1 - start for submit in submits]
        """Of what the pass reads."""
        # A pass of one token is a decode step to many caches.
        columns = max(2, padded_length(max(self._lengths)))
        rows = padded_rows(len(submits))
        self._caches = new_row_caches(model)
        if fill is not None:
            fill(self._caches)
            repeat_row(self._caches, rows)
        begin_right_padding(self._caches, [*self._lengths, *[columns] * (rows - len(submits))], columns)
        padded = np.zeros((rows, columns), dtype=np.int32)
        for row, submit, length in zip(padded, submits, self._lengths, strict=False):
            row[:length] = submit.prompt[start:-1]
        tokens = mx.array(padded)
        self._leaves = leaf_caches(self._caches)
        self._padding = [columns - length for length in self._lengths]
        # Not a method: a circle would keep the arrays until Python's collector runs.
        end = functools.partial(end_right_padding, self._caches)
        if layers is not None:
            self.begun = layers.begin(tokens, self._caches, end)
        else:
            model(tokens, cache=self._caches)
            end()

    @functools.cached_property
    def rows(self) -> MixedRows:
        self._build_rest()
        return mixed_rows(self._leaves, self._padding)

    def columns(self, index: int) -> slice:
        return slice(0, self._lengths[index])

    @property
    def arrays(self) -> list[mx.array]:
        return cache_arrays(self._caches)

    def _save(self, index: int, order: SavePrefix, store: PrefixStore) -> list[mx.array] | None:
        if order.checkpoint is not None and order.tokens != self._start + self._lengths[index]:
            return None
        self._build_rest()

        def tokens(start: int, stop: int) -> Layers:
            full = [kv_parts(leaf) for leaf in self._leaves if is_sliceable(leaf)]
            return [tuple(part[index : index + 1, :, start:stop] for part in parts) for parts in full]

        others = [self._row(leaf, index) for leaf in self._leaves if not is_sliceable(leaf)]
        return store.save_tokens(order, tokens, others)

    def _row(self, leaf: Any, index: int) -> Any:
        """A member's part of a cache that cannot be sliced, as a cache of one row."""
        if isinstance(leaf, ArraysCache):
            return leaf.extract(index)
        length, window = self._start + self._lengths[index], leaf_window(leaf)
        lost = leaf.offset - leaf.keys.shape[2]
        columns = slice(max(0, length - window - lost), length - lost)
        return _window_row(window, [part[index : index + 1, :, columns] for part in (leaf.keys, leaf.values)], length)


class ContinuingGroup(RightPaddedGroup):
    """The same for full attention in all layers: what `ClassCaches` take."""

    @functools.cached_property
    def rows(self) -> JoiningRows:  # type: ignore[override]
        self._build_rest()
        return mixed_rows(self._leaves, self._padding).attending[0]


def _window_row(window: int, parts: Sequence[mx.array], length: int) -> RotatingKVCache:
    """The last tokens of a row of so many, as mlx-lm's cache of one row."""
    row = RotatingKVCache(window)
    row.keys, row.values = parts
    row.offset, row._idx = length, row.keys.shape[2]
    return row


def _state_row(states: Sequence[mx.array]) -> ArraysCache:
    """The states of a row, as mlx-lm's cache of one row."""
    row = ArraysCache(len(states))
    row.cache = list(states)
    return row


def _padded_cache(shared: Padding, packing: KvQuantization | None) -> Any:
    if packing is None:
        return PaddedCache(shared)
    return PaddedPackedCache(shared, bits=packing.bits, group_size=packing.group_size)
