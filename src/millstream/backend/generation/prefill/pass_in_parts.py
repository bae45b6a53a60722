"""A forward pass of a chunk that is built some layers at a time.

Python takes 2 to 5 ms to build the graph of a chunk: as long as several decode steps of a small model. Beside running
rows each step builds the layers that it evaluates, so no step waits for all of them.

The model is called once, with stand-ins for its layers that only note what they are called with. The layers then run
one after the other, whenever they are due. That is the same pass if the model does nothing between two layers but hand
the output of one to the next: `layers_in_parts` makes sure of it.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from millstream.backend.generation.caches.batch_caches import RowCaches, cache_arrays
from millstream.backend.generation.caches.widths import CHUNK_LENGTHS

log = logging.getLogger(__name__)

TRIED = CHUNK_LENGTHS[0]
"""Tokens of each chunk of the trial: a usual length, whose kernels are compiled."""


class NotInParts(Exception):
    """A model does more between its layers than to hand the output of one to the next."""


class _StandIn:
    """Stands for a layer while the model is called: has its attributes, and notes what it is called with."""

    __slots__ = ("_layer", "_note")

    def __init__(self, layer: Any, note: Callable[..., mx.array]) -> None:
        self._layer, self._note = layer, note

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, x: mx.array, *arguments: Any, **named: Any) -> mx.array:
        return self._note(self._layer, x, arguments, named)


class PassInParts:
    """Owner only. A pass whose layers are built in order, as far as they are due."""

    def __init__(self, caches: RowCaches, end: Callable[[], None] | None = None) -> None:
        """`caches`: those that layers are called with. `end`: is called when all layers are built."""
        self._caches = {id(cache) for cache in caches}
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        self._hidden: mx.array | None = None
        self._built = 0
        self._end = end
        self._cancelled = False

    def note(self, layer: Any, x: mx.array, arguments: tuple[Any, ...], named: dict[str, Any]) -> mx.array:
        """A layer is called by the model. Raises `NotInParts`."""
        if self._calls and x is not self._hidden:
            raise NotInParts("it computes between its layers")
        self._hidden = x
        self._calls.append((layer, arguments, named))
        return x

    @property
    def layers(self) -> int:
        """How many were called."""
        return len(self._calls)

    def build_rest(self) -> None:
        """Build all layers that are not built yet."""
        self._build(len(self._calls))

    def cancel(self) -> None:
        """Nobody wants the rest."""
        self._cancelled = True

    def split(self, parts: int, beginning: float = 1.0) -> list[Callable[[], list[mx.array]]]:
        """At most so many functions, to be called in order: each builds some layers, and returns the arrays of their
        caches. Evaluate these. `beginning`: how many layers the first one has, relative to the others."""
        each = len(self._calls) / (parts - 1 + beginning)
        borders = sorted({0, *(round(each * (beginning + part)) for part in range(parts))})
        return [_Part(self, first, stop) for first, stop in itertools.pairwise(borders)]

    def part(self, first: int, stop: int) -> list[mx.array]:
        """Build these layers. Returns the arrays of their caches."""
        if self._cancelled:
            return []
        self._build(stop)
        given = (each for _, arguments, named in self._calls[first:stop] for each in (*arguments, *named.values()))
        return cache_arrays([each for each in given if id(each) in self._caches])

    def _build(self, stop: int) -> None:
        if self._cancelled or self._built >= stop:
            return
        hidden = self._hidden
        for layer, arguments, named in self._calls[self._built : stop]:
            hidden = layer(hidden, *arguments, **named)
            if not isinstance(hidden, mx.array):
                raise NotInParts("its layers give more than their output")
        self._hidden, self._built = hidden, stop
        if stop == len(self._calls):
            self._hidden = None
            if self._end is not None:
                self._end()


class _Part:
    __slots__ = ("_first", "_pass", "_stop")

    def __init__(self, running: PassInParts, first: int, stop: int) -> None:
        self._pass, self._first, self._stop = running, first, stop

    def __call__(self) -> list[mx.array]:
        return self._pass.part(self._first, self._stop)


class LayersInParts:
    """Owner only. The layers of a model that can run in parts."""

    def __init__(self, model: Any) -> None:
        """Raises `NotInParts` if it is not clear where the model has its layers."""
        self._model = model
        self._layers = list(model.layers)
        owners = [
            (module, name)
            for _, module in model.named_modules()
            for name, value in module.items()
            if isinstance(value, list) and len(value) == len(self._layers) and _same(value, self._layers)
        ]
        if len(owners) != 1:
            raise NotInParts("its layers are not in one list")
        self._owner, self._name = owners[0]

    def begin(self, tokens: mx.array, caches: RowCaches, end: Callable[[], None] | None = None) -> PassInParts:
        """A pass over these tokens, of which no layer is built yet. `end`: see `PassInParts`."""
        found = PassInParts(caches, end)
        own = self._owner[self._name]
        self._owner[self._name] = [_StandIn(layer, found.note) for layer in self._layers]
        try:
            self._model(tokens, cache=caches)
        finally:
            self._owner[self._name] = own
        if found.layers != len(self._layers):
            raise NotInParts("it does not call each layer once")
        return found


def _same(these: Sequence[Any], those: Sequence[Any]) -> bool:
    return all(this is that for this, that in zip(these, those, strict=True))


def layers_in_parts(model: Any, vocab_size: int, new_caches: Callable[[], RowCaches]) -> LayersInParts | None:
    """The layers of a model, if passes in parts give the same numbers as others. `new_caches`: for a prompt. Weights
    must be evaluated."""
    try:
        layers = LayersInParts(model)
        whole, parts = new_caches(), new_caches()
        for start in (0, TRIED):
            tokens = mx.arange(start, start + TRIED, dtype=mx.int32)[None] % vocab_size
            model(tokens, cache=whole)
            mx.eval(cache_arrays(whole))
            for build in layers.begin(tokens, parts).split(len(whole)):
                mx.eval(build())
        expected, found = cache_arrays(whole), cache_arrays(parts)
        if len(expected) != len(found) or not all(map(_equal, expected, found)):
            raise NotInParts("its numbers differ then")
    except (NotInParts, AttributeError, TypeError, ValueError) as why:
        log.debug("Chunks are built at once, not in parts: %s", why)
        return None
    return layers


def _equal(this: mx.array, that: mx.array) -> bool:
    return this.shape == that.shape and bool(mx.array_equal(this, that, equal_nan=True).item())
