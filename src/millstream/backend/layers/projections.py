"""Linear layers that read the same input, computed as one.

An attention layer projects its input three times and an MLP twice. On a GPU a decode step is bound by what the host
spends on each launch, so one product instead of three is a third of that cost; the numbers are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class _Fused:
    """The joined layer. The first part that is asked computes all of them; the others find their share here.

    Shares are told apart by the very array that they were computed from, so a model that gives its parts different
    inputs still gets the right numbers.
    """

    def __init__(self, layer: Any, sizes: Sequence[int]) -> None:
        self.layer = layer
        self._cuts = [sum(sizes[: place + 1]) for place in range(len(sizes) - 1)]
        self._source: mx.array | None = None
        self._shares: list[mx.array | None] = []

    def share(self, source: mx.array, place: int) -> mx.array:
        share = self._shares[place] if self._source is source else None
        if share is None:
            self._source = source
            self._shares = list(mx.split(self.layer(source), self._cuts, axis=-1))
            share = self._shares[place]
            assert share is not None
        self._shares[place] = None
        if not any(other is not None for other in self._shares):
            self._source = None
        return share


class _Part(nn.Module):  # type: ignore[misc]
    """Stands where one of the layers stood."""

    def __init__(self, fused: _Fused, place: int) -> None:
        super().__init__()
        self._fused = fused
        self._place = place

    def __call__(self, x: mx.array) -> mx.array:
        return self._fused.share(x, self._place)

    @property
    def whole(self) -> Any:
        """The joined layer."""
        return self._fused.layer


def joined_layer(module: Any, names: Sequence[str]) -> Any:
    """The layer that these parts of a module were joined into; None if they were not."""
    parts = [module.get(name) for name in names]
    wholes = {id(part.whole) for part in parts if isinstance(part, _Part)}
    return parts[0].whole if len(wholes) == 1 and all(isinstance(part, _Part) for part in parts) else None


def joined_layers(model: Any) -> list[Any]:
    """Every joined layer, once."""
    wholes = {id(module.whole): module.whole for _, module in model.named_modules() if isinstance(module, _Part)}
    return list(wholes.values())


def fuse_projections(model: Any, finish: Callable[[Any], Any] = lambda layer: layer) -> int:
    """Join what can be joined, one group at a time so that weights are in memory twice only for one; how many.

    `finish` may put another layer in the place of each joined one.
    """
    joined = 0
    for _, module in list(model.named_modules()):
        for names in GROUPS:
            layers = [module[name] for name in names if name in module]
            if len(layers) == len(names) and _alike(layers):
                fused = _Fused(finish(_join(layers)), [layer.weight.shape[0] for layer in layers])
                for place, name in enumerate(names):
                    module[name] = _Part(fused, place)
                joined += 1
    return joined


def _alike(layers: Sequence[Any]) -> bool:
    """The same kind of plain or quantised layer, all with a bias or all without."""
    first = layers[0]
    if type(first) is nn.Linear:
        same = all(type(layer) is nn.Linear and layer.weight.dtype == first.weight.dtype for layer in layers)
    elif type(first) is nn.QuantizedLinear:
        same = all(type(layer) is nn.QuantizedLinear and _packing(layer) == _packing(first) for layer in layers)
    else:
        return False
    return same and all(set(layer) == set(first) for layer in layers)


def _packing(layer: Any) -> tuple[int, int, str]:
    return layer.bits, layer.group_size, layer.mode


def _join(layers: Sequence[Any]) -> Any:
    """A layer of the same class whose rows are the rows of all."""
    first = layers[0]
    kind: Any = type(first)
    joined = kind.__new__(kind)
    nn.Module.__init__(joined)
    if kind is nn.QuantizedLinear:
        joined.bits, joined.group_size, joined.mode = _packing(first)
    for name in first:
        joined[name] = mx.concatenate([layer[name] for layer in layers], axis=0)
    mx.eval(list(joined.values()))
    return joined
