"""Media features: encoded by a tower in slices, and cached by content hash. Owner only."""

from __future__ import annotations

import functools
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from millstream.backend.generation.media.tower_attention import slice_attention

_LAYERS = (nn.Linear, nn.QuantizedLinear, nn.Conv2d)
"""Layers whose multiplications per output vector equal the number of their parameters."""


@dataclass(frozen=True, slots=True)
class Features:
    """One vector per media token, and `deepstack` vectors, which the model adds after its first layers."""

    tokens: mx.array
    deepstack: tuple[mx.array, ...] = ()

    @property
    def arrays(self) -> list[mx.array]:
        return [self.tokens, *self.deepstack]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


class FeatureCache:
    """An LRU cache of features by content hash, limited to `budget` bytes."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._features: OrderedDict[str, Features] = OrderedDict()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._features)

    def get(self, digest: str) -> Features | None:
        if digest in self._features:
            self._features.move_to_end(digest)
        return self._features.get(digest)

    def put(self, digest: str, features: Features) -> None:
        if digest in self._features or features.nbytes > self._budget:
            return
        self._features[digest] = features
        self.nbytes += features.nbytes
        while self.nbytes > self._budget:
            self.nbytes -= self._features.popitem(last=False)[1].nbytes

    def clear(self) -> None:
        self._features.clear()
        self.nbytes = 0


@dataclass(frozen=True, slots=True)
class Stage:
    """The lazy output of one layer of the tower, and its approximate number of multiplications."""

    out: mx.array
    cost: float


class Encoding:
    """An encoding in progress. MLX is lazy: the whole tower is called at once, and evaluated layer by layer."""

    def __init__(self, stages: list[Stage], features: Features) -> None:
        self._stages = deque(stages)
        self._features = features

    def advance(self, budget: float) -> tuple[list[mx.array], Features | None]:
        """Continue by about `budget` multiplications, at least by one layer. Returns the arrays to evaluate, and the
        features once the last layer is reached."""
        last: Stage | None = None
        while self._stages and (last is None or budget >= self._stages[0].cost):
            last = self._stages.popleft()
            budget -= last.cost
        if self._stages and last is not None:
            return [last.out], None
        return self._features.arrays, self._features


class Tower:
    """The vision and audio towers of a model. Their layers and attention are patched to record each output."""

    def __init__(self, vlm: Any) -> None:
        self._stages: list[Stage] = []
        children = vlm.children().items()
        for part in [child for name, child in children if name != "language_model" and isinstance(child, nn.Module)]:
            slice_attention(part, self._record)
            # By identity: Gemma 4's audio attention has one of its layers under two names.
            layers = {id(layer): layer for _, layer in part.named_modules() if isinstance(layer, _LAYERS)}
            for layer in layers.values():
                parameters = sum(value.size for _, value in tree_flatten(layer.parameters()))
                layer.__class__ = _recording(type(layer), functools.partial(self._record_layer, parameters))

    def encode(self, run: Callable[[], Features]) -> Encoding:
        """Call the tower through `run`, which returns lazy features, and record its stages."""
        self._stages.clear()
        features = run()
        stages, self._stages[:] = list(self._stages), []
        return Encoding(stages, features)

    def _record(self, out: mx.array, cost: float) -> None:
        self._stages.append(Stage(out, cost))

    def _record_layer(self, parameters: int, out: mx.array) -> None:
        self._record(out, out.size // out.shape[-1] * float(parameters))


def _recording(kind: type, record: Callable[[Any], None]) -> type:
    """A subclass of the layer that records its output."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = kind.__call__(self, *args, **kwargs)
        record(out)
        return out

    return type(kind.__name__, (kind,), {"__call__": call})
