"""Flat passes: whole prompts of any lengths in one forward pass that costs what their tokens cost.

A padded pass has another shape for every number and length of prompts: Python builds its graph anew, and all of its
arrays have sizes that the device has to allocate. A flat pass has one of a few lengths, so its graph is traced once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from millstream.backend.generation.caches.flat_caches import (
    FlatCache,
    FlatPackedCache,
    FlatPrompts,
    FlatStates,
    states_after,
)
from millstream.backend.generation.caches.quantized import KvQuantization
from millstream.backend.generation.caches.slab_reads import VACANT
from millstream.backend.generation.caches.slabs import Parts
from millstream.backend.generation.caches.widths import flat_length


class FlatPasses:
    """Owner only. Runs flat passes of one model. `windows`: how many tokens each layer attends to, 0 for all; None if
    it keeps a state. `compiled`: as a function that is traced once for each length; it has the weights in it, so it
    lives no longer than the model."""

    def __init__(
        self, model: Any, windows: Sequence[int | None], packing: KvQuantization | None = None, *, compiled: bool
    ) -> None:
        self._model = model
        self.windows = tuple(windows)
        self._packing = packing
        self._run: Callable[..., list[Parts]] = mx.compile(self._pass) if compiled else self._pass

    def run(self, prompts: Sequence[Sequence[int]]) -> tuple[list[Parts], tuple[tuple[int, int], ...]]:
        """Run these tokens. Returns the parts of each layer, (1, heads, columns, any), and where each prompt is in
        them: its first column and its length. A layer that keeps a state has that of each prompt, (prompts, …)."""
        tokens: list[int] = []
        positions: list[int] = []
        firsts: list[int] = []
        places = []
        for prompt in prompts:
            places.append((len(tokens), len(prompt)))
            firsts += [len(tokens)] * len(prompt)
            positions += range(len(prompt))
            tokens += prompt
        used, length = len(tokens), flat_length(len(tokens))
        tokens += [0] * (length - used)
        positions += [VACANT] * (length - used)
        firsts += range(used, length)
        numbers = mx.array([tokens, positions, firsts], dtype=mx.int32)
        layers = self._run(numbers)
        for index, window in enumerate(self.windows):
            if window is None:
                (columns,) = layers[index]
                layers[index] = (states_after(columns, length, places),)
        return layers, tuple(places)

    def _pass(self, numbers: mx.array) -> list[Parts]:
        # What comes from a list is in the host's memory: without a copy every kernel would read it from there.
        tokens, positions, firsts = (mx.squeeze(each, axis=0) for each in mx.split(numbers + 0, 3))
        shared = FlatPrompts(positions, firsts)
        caches = [self._cache(shared, window) for window in self.windows]
        self._model(tokens[:, None], cache=caches)
        return [cache.parts for cache in caches]

    def _cache(self, shared: FlatPrompts, window: int | None) -> FlatCache | FlatStates:
        if window is None:
            return FlatStates(shared)
        if self._packing is None:
            return FlatCache(shared, window)
        return FlatPackedCache(shared, bits=self._packing.bits, group_size=self._packing.group_size)
