"""Fused small-batch matmuls: CUDA kernels and their MLX reference, behind one interface."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from millstream.backend.kernels import norm_add, small_matmul
from millstream.backend.kernels.weights import Dense, Form, Norm, Packed, Weight, as_weight
from millstream.backend.layers import matmul_reference
from millstream.backend.layers.matmul_reference import Activation, join_heads, rope, split_heads

__all__ = [
    "BY_KERNELS",
    "BY_MLX",
    "BY_MLX_COMPILED",
    "Activation",
    "Dense",
    "Form",
    "FusedMatmuls",
    "Norm",
    "Packed",
    "Weight",
    "as_weight",
    "join_heads",
    "rope",
    "split_heads",
]


@dataclass(frozen=True, slots=True)
class FusedMatmuls:
    """Matmuls with what stands before and after them, by one implementation. `matmul_reference` says what each one
    computes. A weight is a `Weight` or a plain array."""

    fits: Callable[[Weight | mx.array], bool]
    """True if this implementation takes the weight. Also for the halves of `glu`."""
    fits_heads: Callable[[int], bool]
    """True if `qkv_rope` takes heads of this size."""
    prepare: Callable[[Weight | mx.array], Weight]
    """The weight with what the implementation keeps beside it: call it once for each weight, at load."""
    tune: Callable[[Iterable[mx.array]], None]
    """Measure which kernels are fastest for a model's dense weights: call it once at load, before the others."""
    matmul: Callable[..., mx.array]
    """(x, weight, *, bias, norm)"""
    matmul_add: Callable[..., mx.array]
    """(x, weight, residual, *, bias, norm, factor)"""
    glu: Callable[..., mx.array]
    """(x, weight, *, activation, bias, norm)"""
    qkv_rope: Callable[..., tuple[mx.array, mx.array, mx.array]]
    """(x, weight, offset, periods, heads, groups, size, *, bias, norm, q_norm, k_norm, factor)"""
    norm_add: Callable[..., Any]
    """(x, norm, residual, *, after): the sum, or with `after` the sum and the normed sum."""
    compile: Callable[[Any], Any]
    """A kernel's source is assembled at every call, unless the call is part of a compiled function."""


def _norm_add(x: mx.array, norm: Norm, residual: mx.array, *, after: Norm | None = None) -> Any:
    by = norm_add if norm_add.fits(x) else matmul_reference
    return by.norm_add(x, norm, residual, after=after)


BY_MLX = FusedMatmuls(
    fits=lambda weight: True,
    fits_heads=lambda size: True,
    prepare=as_weight,
    tune=lambda weights: None,
    matmul=matmul_reference.matmul,
    matmul_add=matmul_reference.matmul_add,
    glu=matmul_reference.glu,
    qkv_rope=matmul_reference.qkv_rope,
    norm_add=matmul_reference.norm_add,
    compile=lambda function: function,
)
BY_MLX_COMPILED = dataclasses.replace(BY_MLX, compile=mx.compile)
BY_KERNELS = FusedMatmuls(
    fits=small_matmul.fits,
    fits_heads=small_matmul.fits_heads,
    prepare=small_matmul.prepare,
    tune=small_matmul.tune,
    matmul=small_matmul.matmul,
    matmul_add=small_matmul.matmul_add,
    glu=small_matmul.glu,
    qkv_rope=small_matmul.qkv_rope,
    norm_add=_norm_add,
    compile=mx.compile,
)
