"""What encoders compute with: MLX's own operations, or those that are faster on x86_64 CPUs. Owner only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from millstream.backend.layers.cpu_linear import mkl_layout_pays, mkl_matmul
from millstream.backend.layers.softmax_attention import softmax_attention
from millstream.backend.layers.vector_math import exp_in_place, gelu_in_place, has_mkl
from millstream.errors import ModelError

Activation = Callable[[mx.array], mx.array]

FAST_PATH = "mkl-layout"
"""The name in `config.FAST_PATHS`."""
SMALL = 2_048
"""Elements from which on MKL pays. Fewer than in a decode step: nothing runs ahead of an encoder's step."""


@dataclass(frozen=True, slots=True)
class Operations:
    linear: Callable[[mx.array, mx.array, mx.array | None], mx.array]
    """Input, weight and bias."""
    attention: Callable[[mx.array, mx.array, mx.array, float, mx.array | None], mx.array]
    """Queries, keys, values, scale and mask: True for pairs that attend, or numbers to add."""
    activations: Mapping[str, Activation]
    """They may overwrite their argument, which nothing else may refer to."""

    def activation(self, name: object) -> Activation:
        if not isinstance(name, str) or name not in self.activations:
            known = ", ".join(self.activations)
            raise ModelError(f"config.json: the activation {name!r} is not supported; supported: {known}")
        return self.activations[name]


def operations(*, on_cpu: bool, disabled: frozenset[str] = frozenset()) -> Operations:
    return MKL if on_cpu and FAST_PATH not in disabled and mkl_layout_pays() and has_mkl() else MLX


def _linear(x: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
    return x @ weight.T if bias is None else mx.addmm(bias, x, weight.T)


def _attention(queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | None) -> mx.array:
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)


def _mkl_linear(x: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
    out = mkl_matmul(x, weight)
    return out if bias is None else out + bias


def _mkl_attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | None
) -> mx.array:
    if mask is None or mask.dtype != mx.bool_ or mask.shape[1:3] != (1, 1):
        return softmax_attention(queries, keys, values, scale, mask, SMALL)
    # Padding comes after the tokens. Instead of a mask on all pairs, it gets the first token's key, which changes no
    # maximum, and counts for nothing in the sums.
    keep = mask.swapaxes(-1, -2)
    keys = mx.where(keep, keys, keys[..., :1, :])
    values = mx.where(keep, values, 0.0)
    return softmax_attention(queries, keys, values, scale, None, SMALL, counts=keep.astype(mx.float32))


def _silu(x: mx.array) -> mx.array:
    return x / (1 + exp_in_place(-x, SMALL))


def _gelu_approx(x: mx.array) -> mx.array:
    """x times the logistic function of 2 u is x (1 + tanh u) / 2."""
    twice = (2 * 0.7978845608028654) * (x + 0.044715 * x * x * x)
    return x / (1 + exp_in_place(-twice, SMALL))


_ACTIVATIONS: dict[str, Activation] = {
    "gelu": nn.gelu,
    "gelu_new": nn.gelu_approx,
    "gelu_pytorch_tanh": nn.gelu_approx,
    "relu": nn.relu,
    "silu": nn.silu,
    "swish": nn.silu,
    "tanh": mx.tanh,
}
_MKL_ACTIVATIONS = {
    "gelu": gelu_in_place,
    "gelu_new": _gelu_approx,
    "gelu_pytorch_tanh": _gelu_approx,
    "silu": _silu,
    "swish": _silu,
}

MLX = Operations(_linear, _attention, _ACTIVATIONS)
MKL = Operations(_mkl_linear, _mkl_attention, _ACTIVATIONS | _MKL_ACTIVATIONS)
