"""Linear layers and SwiGLU for x86_64 CPUs: small-batch matmuls in the layout that MKL computes fastest.

With 4 to 48 rows MKL repacks all weights at every call of x @ W.T: 72 ms for 30 layers of 3072 x 576 and 16 rows on 2
cores of a 2.5 GHz Xeon. The same matmul written as (W @ x.T).T takes 28 ms.

MLX's exponential is slow there too: in prefill, the activations took as long as all matmuls together. `vector_math` has
a faster one.
"""

from __future__ import annotations

import platform
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from millstream.backend.layers.patch_layers import patch_function
from millstream.backend.layers.vector_math import LARGE, exp_in_place, exp_polynomial

SMALL_BATCH = range(4, 49)
"""Numbers of rows for which (W @ x.T).T is faster."""


def mkl_layout_pays() -> bool:
    """True on x86_64, where it was measured with MKL."""
    return platform.machine() == "x86_64"


def mkl_matmul(x: mx.array, weight: mx.array) -> mx.array:
    """x @ weight.T, in the layout that is faster for this many rows."""
    rows = x.size // x.shape[-1]
    if rows not in SMALL_BATCH:
        return x @ weight.T
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
        self.weight = layer.weight
        if "bias" in layer:
            self.bias = layer.bias

    def __call__(self, x: mx.array) -> mx.array:
        out = mkl_matmul(x, self["weight"])
        return out + self["bias"] if "bias" in self else out


class MklEmbedding(nn.Embedding):  # type: ignore[misc]
    """An embedding that may be the output layer as well."""

    def __init__(self, layer: Any) -> None:
        nn.Module.__init__(self)
        self.weight = layer.weight

    def __call__(self, ids: mx.array) -> mx.array:
        out: mx.array = self["weight"][ids]
        return out

    def as_linear(self, x: mx.array) -> mx.array:
        return mkl_matmul(x, self["weight"])


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
