"""Linear layers and SwiGLU for x86_64 CPUs: small-batch matmuls in the layout that MKL computes fastest.

With 4 to 48 rows MKL repacks all weights at every call of x @ W.T: 72 ms for 30 layers of 3072 x 576 and 16 rows on 2
cores of a 2.5 GHz Xeon. The same matmul written as (W @ x.T).T takes 28 ms.

MLX's exponential is slow there too: in prefill, the activations took as long as all matmuls together. `vector_math` has
a faster one.
"""

from __future__ import annotations

import logging
import math
import platform
import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from millstream.backend.layers.mkl_packed import SHARE_OF_MEMORY, PackedWeight, can_be_packed, works
from millstream.backend.layers.patch_layers import patch_function
from millstream.backend.layers.projections import joined_layers
from millstream.backend.layers.vector_math import LARGE, exp_in_place, exp_polynomial

log = logging.getLogger(__name__)

SMALL_BATCH = range(4, 49)
"""Numbers of rows for which (W @ x.T).T is faster."""

MEASURED_ROWS, MEASURED_BYTES, REPETITIONS = (4, 16), 64 * 2**20, 5
"""How it is measured whether packed weights are faster: with more bytes than a processor's cache holds."""
PAYS = 0.8
"""They must take at most this share of the time, for the memory that they take."""


def mkl_layout_pays() -> bool:
    """True on x86_64, where it was measured with MKL."""
    return platform.machine() == "x86_64"


def mkl_matmul(x: mx.array, weight: mx.array, packed: PackedWeight | None = None) -> mx.array:
    """x @ weight.T, in the layout that is faster for this many rows. `packed`: of this weight, if it may be used."""
    rows = x.size // x.shape[-1]
    if rows not in SMALL_BATCH:
        return x @ weight.T
    if packed is not None and x.dtype == mx.float32:
        return packed.multiply(x, weight)
    return mx.contiguous((weight @ x.reshape(rows, -1).T).T).reshape(*x.shape[:-1], -1)


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """mlx-lm's function of this name, for float32."""
    return gate / (1 + exp_in_place(-gate)) * x if gate.size >= LARGE else _small_swiglu(gate, x)


@mx.compile
def _small_swiglu(gate: mx.array, x: mx.array) -> mx.array:
    return gate / (1 + exp_polynomial(-gate)) * x


class MklLinear(nn.Module):  # type: ignore[misc]
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self._packed: PackedWeight | None = None
        self.weight = layer.weight
        if "bias" in layer:
            self.bias = layer.bias

    def __call__(self, x: mx.array) -> mx.array:
        out = mkl_matmul(x, self["weight"], self._packed)
        return out + self["bias"] if "bias" in self else out


class MklEmbedding(nn.Module):  # type: ignore[misc]
    """An embedding that may be the output layer as well."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self._packed: PackedWeight | None = None
        self.weight = layer.weight

    def __call__(self, ids: mx.array) -> mx.array:
        out: mx.array = self["weight"][ids]
        return out

    def as_linear(self, x: mx.array) -> mx.array:
        return mkl_matmul(x, self["weight"], self._packed)


def mkl_layer(layer: Any) -> Any:
    """A layer with the weights of this one; quantised and other kinds of layers are returned as they are."""
    if type(layer) is nn.Linear:
        return MklLinear(layer)
    return MklEmbedding(layer) if type(layer) is nn.Embedding else layer


def use_mkl_layout(model: Any) -> None:
    """Replace every plain layer of the model, and its SwiGLU if all weights are float32."""
    if all(value.dtype == mx.float32 for _, value in tree_flatten(model.parameters())):
        patch_function(model, "swiglu", swiglu)
    for _, module in list(model.named_modules()):
        for name, child in list(module.items()):
            if isinstance(child, nn.Module):
                module[name] = mkl_layer(child)


def allow_packing(model: Any, free_bytes: int) -> int:
    """Let the large layers of a model compute small batches with packed weights, which are in memory beside the plain
    ones, if that is faster here. Returns the bytes that this may take; 0 if it is not done."""
    modules = [*(module for _, module in model.named_modules()), *joined_layers(model)]
    layers = {id(each): each for each in modules if isinstance(each, MklLinear | MklEmbedding)}
    large = [layer for layer in layers.values() if can_be_packed(layer.weight)]
    size = sum(int(layer.weight.nbytes) for layer in large)
    if not size or size * SHARE_OF_MEMORY > free_bytes or not works():
        return 0
    if not _packing_pays([layer.weight for layer in large]):
        return 0
    for layer in large:
        layer._packed = PackedWeight()
    return size


def _packing_pays(weights: Sequence[mx.array]) -> bool:
    """Measures some of the weights both ways, in alternation: the least time of each counts."""
    chosen: list[mx.array] = []
    for weight in weights:
        if sum(each.nbytes for each in chosen) < MEASURED_BYTES:
            chosen.append(weight)
    ways: tuple[list[PackedWeight | None], ...] = ([None for _ in chosen], [PackedWeight() for _ in chosen])
    seconds = [0.0, 0.0]
    for rows in MEASURED_ROWS:
        inputs = [mx.random.normal((rows, weight.shape[1])) for weight in chosen]
        mx.eval(inputs, chosen)
        best = [math.inf, math.inf]
        for _ in range(REPETITIONS):
            for way, helpers in enumerate(ways):
                started = time.perf_counter()
                mx.eval([mkl_matmul(*each) for each in zip(inputs, chosen, helpers, strict=True)])
                best[way] = min(best[way], time.perf_counter() - started)
        seconds = [total + least for total, least in zip(seconds, best, strict=True)]
    log.debug("small matmuls: %.1f ms, packed %.1f ms", *(1000 * each for each in seconds))
    return seconds[1] < PAYS * seconds[0]
