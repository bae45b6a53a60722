"""What a tower makes of an image or a sound: computed in slices, kept by its hash. Owner only."""

from __future__ import annotations

import functools
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from millstream.backend.generation.media.tower_attention import cut_attention

_LAYERS = (nn.Linear, nn.QuantizedLinear, nn.Conv2d)
"""Whose every output takes as many multiplications as they have numbers."""


@dataclass(frozen=True, slots=True)
class Features:
    """One vector for each of the media's tokens; and `deep` ones, which are added behind the first layers."""

    tokens: mx.array
    deep: tuple[mx.array, ...] = ()

    @property
    def arrays(self) -> list[mx.array]:
        return [self.tokens, *self.deep]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


class FeatureCache:
    """Features by hash, at most `budget` bytes; the least recently used leave."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._kept: OrderedDict[str, Features] = OrderedDict()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, digest: str) -> Features | None:
        if digest in self._kept:
            self._kept.move_to_end(digest)
        return self._kept.get(digest)

    def put(self, digest: str, features: Features) -> None:
        if digest in self._kept or features.nbytes > self._budget:
            return
        self._kept[digest] = features
        self.nbytes += features.nbytes
        while self.nbytes > self._budget:
            self.nbytes -= self._kept.popitem(last=False)[1].nbytes

    def clear(self) -> None:
        self._kept.clear()
        self.nbytes = 0


@dataclass(frozen=True, slots=True)
class Stage:
    """What a layer of the tower puts out, not computed yet, and about how many multiplications it takes."""

    out: mx.array
    work: float


class Encoding:
    """An image on its way through the tower. MLX computes nothing until it is asked to: the whole tower is written down
    at once, and evaluated layer by layer."""

    def __init__(self, stages: list[Stage], features: Features) -> None:
        self._stages = deque(stages)
        self._features = features

    def advance(self, work: float) -> tuple[list[mx.array], Features | None]:
        """Go on for about that much work, at least a layer. What must be evaluated; the features after the last."""
        last: Stage | None = None
        while self._stages and (last is None or work >= self._stages[0].work):
            last = self._stages.popleft()
            work -= last.work
        if self._stages and last is not None:
            return [last.out], None
        return self._features.arrays, self._features


class Tower:
    """Everything of a model that is not its language model, with its layers and its attention under watch."""

    def __init__(self, whole: Any) -> None:
        self._stages: list[Stage] = []
        children = whole.children().items()
        for part in [child for name, child in children if name != "language_model" and isinstance(child, nn.Module)]:
            cut_attention(part, self._note)
            # By identity: Gemma 4's attention over sounds has one of its layers under two names.
            layers = {id(layer): layer for _, layer in part.named_modules() if isinstance(layer, _LAYERS)}
            for layer in layers.values():
                numbers = sum(value.size for _, value in tree_flatten(layer.parameters()))
                layer.__class__ = _watched(type(layer), functools.partial(self._note_layer, numbers))

    def encode(self, run: Callable[[], Features]) -> Encoding:
        """`run` calls the tower; nothing of it is computed yet."""
        self._stages.clear()
        features = run()
        stages, self._stages[:] = list(self._stages), []
        return Encoding(stages, features)

    def _note(self, out: mx.array, work: float) -> None:
        self._stages.append(Stage(out, work))

    def _note_layer(self, numbers: int, out: mx.array) -> None:
        self._note(out, out.size // out.shape[-1] * float(numbers))


def _watched(kind: type, note: Callable[[Any], None]) -> type:
    """The same layer, which tells what it puts out."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = kind.__call__(self, *args, **kwargs)
        note(out)
        return out

    return type(kind.__name__, (kind,), {"__call__": call})
