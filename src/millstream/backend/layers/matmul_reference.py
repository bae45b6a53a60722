"""Fused matmuls by operations of MLX: what the kernels must give, and what runs where there are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import mlx.core as mx
import mlx.nn as nn

from millstream.backend.kernels.weights import Dense, Norm, Weight, as_weight
from millstream.backend.layers import packed_products

Activation = Literal["silu", "gelu", "gelu_tanh", "clipped"]
"""Of a gated linear unit. `clipped` is gpt-oss's: a sigmoid of 1.702 times the gate, both halves clipped, up plus 1."""


def product(x: mx.array, weight: Weight | mx.array, bias: mx.array | None = None, norm: Norm | None = None) -> mx.array:
    """x @ weight.T, of the normed x if there is a norm."""
    weight = as_weight(weight)
    if norm is not None:
        x = mx.fast.rms_norm(x, norm.weight, norm.eps)
    if isinstance(weight, Dense):
        return x @ weight.weight.T if bias is None else mx.addmm(bias, x, weight.weight.T)
    out = packed_products.product(x, weight)
    return out if bias is None else out + bias


def matmul(
    x: mx.array,
    weight: Weight | mx.array,
    *,
    bias: mx.array | None = None,
    norm: Norm | None = None,
) -> mx.array:
    """norm(x) @ weight.T + bias"""
    return product(x, weight, bias, norm)


def matmul_add(
    x: mx.array,
    weight: Weight | mx.array,
    residual: mx.array,
    *,
    bias: mx.array | None = None,
    norm: Norm | None = None,
    factor: float = 1.0,
) -> mx.array:
    """residual + factor * (norm(x) @ weight.T + bias)"""
    weight = as_weight(weight)
    if isinstance(weight, Dense) and bias is None and norm is None and factor == 1.0:
        return mx.addmm(residual, x, weight.weight.T)
    out = product(x, weight, bias, norm)
    return residual + (out if factor == 1.0 else out * factor)


def glu(
    x: mx.array,
    weight: Weight | mx.array,
    *,
    activation: Activation = "silu",
    bias: mx.array | None = None,
    norm: Norm | None = None,
) -> mx.array:
    """activation(gate) * up, where the first half of the weight's rows gives the gate."""
    return gated(product(x, weight, bias, norm), activation)


def gated(joined: mx.array, activation: Activation) -> mx.array:
    gate, up = mx.split(joined, 2, axis=-1)
    return ACTIVATIONS[activation](gate, up)


def _clipped(gate: mx.array, up: mx.array, alpha: float = 1.702, limit: float = 7.0) -> mx.array:
    gate, up = mx.minimum(gate, limit), mx.clip(up, -limit, limit)
    return gate * mx.sigmoid(alpha * gate) * (up + 1)


ACTIVATIONS: dict[Activation, Callable[[mx.array, mx.array], mx.array]] = {
    "silu": lambda gate, up: nn.silu(gate) * up,
    "gelu": lambda gate, up: nn.gelu(gate) * up,
    "gelu_tanh": lambda gate, up: nn.gelu_approx(gate) * up,
    "clipped": _clipped,
}


def qkv_rope(
    x: mx.array,
    weight: Weight | mx.array,
    offset: mx.array,
    periods: mx.array | None,
    heads: int,
    groups: int,
    size: int,
    *,
    bias: mx.array | None = None,
    norm: Norm | None = None,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
    factor: float = 1.0,
) -> tuple[mx.array, mx.array, mx.array]:
    """Queries, keys and values of (rows, heads or groups, length, size); norms of single heads and then RoPE are
    applied to the first two. `periods` are those of the rotated pairs, twice as many numbers of a head; None for no
    RoPE. `factor` is what the rotated numbers are multiplied by (YaRN)."""
    joined = product(x, weight, bias, norm)
    return heads_of(joined, offset, periods, heads, groups, size, q_norm=q_norm, k_norm=k_norm, factor=factor)


def heads_of(
    joined: mx.array,
    offset: mx.array,
    periods: mx.array | None,
    heads: int,
    groups: int,
    size: int,
    *,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
    factor: float = 1.0,
) -> tuple[mx.array, mx.array, mx.array]:
    """A joined projection as `qkv_rope` gives it."""
    queries, keys, values = split_heads(joined, heads, groups, size)
    if q_norm is not None:
        queries = mx.fast.rms_norm(queries, q_norm.weight, q_norm.eps)
    if k_norm is not None:
        keys = mx.fast.rms_norm(keys, k_norm.weight, k_norm.eps)
    if periods is not None:
        queries, keys = (rope(each, offset, periods, factor) for each in (queries, keys))
    return queries, keys, values


def norm_add(
    x: mx.array, norm: Norm, residual: mx.array, *, after: Norm | None = None
) -> mx.array | tuple[mx.array, mx.array]:
    """residual + norm(x); with `after` also that sum, normed again."""
    out = residual + mx.fast.rms_norm(x, norm.weight, norm.eps)
    return out if after is None else (out, mx.fast.rms_norm(out, after.weight, after.eps))


def split_heads(joined: mx.array, heads: int, groups: int, size: int) -> tuple[mx.array, mx.array, mx.array]:
    """A joined projection, (rows, length, all), as queries, keys and values, (rows, heads or groups, length, size)."""
    rows, length, _ = joined.shape
    parts = mx.split(joined, [heads * size, (heads + groups) * size], axis=-1)
    queries, keys, values = (part.reshape(rows, length, -1, size).transpose(0, 2, 1, 3) for part in parts)
    return queries, keys, values


def join_heads(attended: mx.array) -> mx.array:
    """The output of attention, (rows, heads, length, size), as (rows, length, all)."""
    rows, _, length, _ = attended.shape
    return (attended if length == 1 else attended.transpose(0, 2, 1, 3)).reshape(rows, length, -1)


def rope(x: mx.array, offset: mx.array, periods: mx.array, factor: float = 1.0) -> mx.array:
    """RoPE, from each row's position on, of the first numbers of each head: two for each period."""
    turned = 2 * periods.shape[0]
    if factor != 1.0:
        x = mx.concatenate([x[..., :turned] * factor, x[..., turned:]], axis=-1)
    return mx.fast.rope(x, turned, traditional=False, base=None, scale=1.0, offset=offset, freqs=periods)
