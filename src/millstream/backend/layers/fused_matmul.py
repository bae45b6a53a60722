"""Fused small-batch matmuls: CUDA kernels and their MLX reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from millstream.backend.kernels import small_matmul


@dataclass(frozen=True, slots=True)
class FusedMatmuls:
    """The functions of `kernels.small_matmul`, by one implementation."""

    fits: Callable[[mx.array], bool]
    fits_heads: Callable[[int], bool]
    matmul: Callable[[mx.array, mx.array], mx.array]
    matmul_add: Callable[[mx.array, mx.array, mx.array], mx.array]
    swiglu: Callable[[mx.array, mx.array], mx.array]
    qkv_rope: Callable[..., tuple[mx.array, mx.array, mx.array]]
    compile: Callable[[Any], Any]
    """A kernel's source is assembled at every call, unless the call is part of a compiled function."""


def _matmul(x: mx.array, weight: mx.array) -> mx.array:
    return x @ weight.T


def _matmul_add(x: mx.array, weight: mx.array, residual: mx.array) -> mx.array:
    return mx.addmm(residual, x, weight.T)


def _swiglu(x: mx.array, weight: mx.array) -> mx.array:
    gate, up = mx.split(x @ weight.T, 2, axis=-1)
    out: mx.array = nn.silu(gate) * up
    return out


def _qkv_rope(
    x: mx.array, weight: mx.array, offset: mx.array, periods: mx.array, heads: int, groups: int, size: int
) -> tuple[mx.array, mx.array, mx.array]:
    queries, keys, values = split_heads(x @ weight.T, heads, groups, size)
    return rope(queries, offset, periods), rope(keys, offset, periods), values


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


def rope(x: mx.array, offset: mx.array, periods: mx.array) -> mx.array:
    """RoPE, from each row's position on."""
    return mx.fast.rope(x, x.shape[-1], traditional=False, base=None, scale=1.0, offset=offset, freqs=periods)


BY_MLX = FusedMatmuls(
    fits=lambda weight: True,
    fits_heads=lambda size: True,
    matmul=_matmul,
    matmul_add=_matmul_add,
    swiglu=_swiglu,
    qkv_rope=_qkv_rope,
    compile=lambda function: function,
)
BY_MLX_COMPILED = dataclasses.replace(BY_MLX, compile=mx.compile)
BY_KERNELS = FusedMatmuls(
    fits=small_matmul.fits,
    fits_heads=small_matmul.fits_heads,
    matmul=small_matmul.matmul,
    matmul_add=small_matmul.matmul_add,
    swiglu=small_matmul.swiglu_matmul,
    qkv_rope=small_matmul.qkv_rope,
    compile=mx.compile,
)
