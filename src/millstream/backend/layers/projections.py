"""Joins linear layers that read the same input into one matmul.

An attention layer projects its input three times and an MLP twice. On a GPU a decode step is bound by what the host
spends on each launch, so one matmul instead of three is a third of that cost; the numbers are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

GROUPS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("q_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkvz", "in_proj_ba"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
)
"""Names of layers that read the same input, in several families. A module that gives its parts different inputs gets
the same numbers, but computes them twice."""


class _Joined:
    """The joined layer. The first part that is called computes all of them; the others take their slice from here.

    A slice is used only for the very array that it was computed from, so a model that gives its parts different inputs
    still gets the right numbers.
    """

    def __init__(self, layer: Any, sizes: Sequence[int]) -> None:
        self.layer = layer
        self._cuts = [sum(sizes[: index + 1]) for index in range(len(sizes) - 1)]
        self._input: mx.array | None = None
        self._slices: list[mx.array | None] = []

    def slice(self, x: mx.array, index: int) -> mx.array:
        """The output of one part. Each slice is handed out once, so that no array lives longer than needed."""
        part = self._slices[index] if self._input is x else None
        if part is None:
            self._input = x
            self._slices = list(mx.split(self.layer(x), self._cuts, axis=-1))
            part = self._slices[index]
            assert part is not None
        self._slices[index] = None
        if not any(other is not None for other in self._slices):
            self._input = None
        return part


class _Part(nn.Module):  # type: ignore[misc]
    """Replaces one of the layers."""

    def __init__(self, joined: _Joined, index: int) -> None:
        super().__init__()
        self._joined = joined
        self._index = index

    def __call__(self, x: mx.array) -> mx.array:
        return self._joined.slice(x, self._index)

    @property
    def joined_layer(self) -> Any:
        return self._joined.layer


def joined_layer(module: Any, names: Sequence[str]) -> Any:
    """The layer that these layers of a module were joined into; None if they were not."""
    parts = [module.get(name) for name in names]
    if not all(isinstance(part, _Part) for part in parts):
        return None
    layers = {id(part.joined_layer): part.joined_layer for part in parts}
    return parts[0].joined_layer if len(layers) == 1 else None


def part_of(layer: Any) -> Any:
    """The layer that this one was joined into; None if it was not."""
    return layer.joined_layer if isinstance(layer, _Part) else None


def joined_layers(model: Any) -> list[Any]:
    """Every joined layer, once."""
    parts = [module for _, module in model.named_modules() if isinstance(module, _Part)]
    return list({id(part.joined_layer): part.joined_layer for part in parts}.values())


def fuse_projections(model: Any, finish: Callable[[Any], Any] = lambda layer: layer) -> int:
    """Join layers of every group; returns how many groups. One at a time, so that only the weights of one group are in
    memory twice.

    `finish` may replace each joined layer.
    """
    count = 0
    for _, module in list(model.named_modules()):
        for names in GROUPS:
            layers = [module[name] for name in names if name in module]
            if len(layers) == len(names) and _can_be_joined(layers):
                joined = _Joined(finish(_join(layers)), [layer.weight.shape[0] for layer in layers])
                for index, name in enumerate(names):
                    module[name] = _Part(joined, index)
                count += 1
    return count


def _can_be_joined(layers: Sequence[Any]) -> bool:
    """True for layers of the same plain or quantised kind, all with a bias or all without."""
    first = layers[0]
    if type(first) is nn.Linear:
        same = all(type(layer) is nn.Linear and layer.weight.dtype == first.weight.dtype for layer in layers)
    elif type(first) is nn.QuantizedLinear:
        same = all(
            type(layer) is nn.QuantizedLinear and _quantisation(layer) == _quantisation(first) for layer in layers
        )
    else:
        return False
    return same and all(set(layer) == set(first) for layer in layers)


def _quantisation(layer: Any) -> tuple[int, int, str]:
    return layer.bits, layer.group_size, layer.mode


def _join(layers: Sequence[Any]) -> Any:
    """A layer of the same class with the rows of all."""
    first = layers[0]
    kind: Any = type(first)
    joined = kind.__new__(kind)
    nn.Module.__init__(joined)
    if kind is nn.QuantizedLinear:
        joined.bits, joined.group_size, joined.mode = _quantisation(first)
    for name in first:
        joined[name] = mx.concatenate([layer[name] for layer in layers], axis=0)
    mx.eval(list(joined.values()))
    return joined
