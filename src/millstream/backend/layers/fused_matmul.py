"""Fused small-batch matmuls: CUDA kernels and their MLX reference, behind one interface."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx

from millstream.backend.kernels import epilogues, matmul_tuning, norm_add, small_matmul
from millstream.backend.kernels.matmul_tuning import Role
from millstream.backend.kernels.weights import Dense, Form, Norm, Packed, Weight, as_weight
from millstream.backend.layers import matmul_choice, matmul_reference, packed_choice
from millstream.backend.layers.matmul_reference import Activation, join_heads, rope, split_heads

__all__ = [
    "BY_CUBLAS",
    "BY_KERNELS",
    "BY_MLX",
    "BY_MLX_COMPILED",
    "Activation",
    "Call",
    "Dense",
    "Form",
    "FusedMatmuls",
    "Norm",
    "Packed",
    "Role",
    "Weight",
    "as_weight",
    "calls_of",
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
    prepare: Callable[..., Weight]
    """(weight, role): the weight with what the implementation keeps beside it. Call it once for each weight, at load:
    what is fastest for a weight of this size in this role, the name of a function below, may be measured."""
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


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of `BY_KERNELS`, without its rows: these have so many numbers of this type."""

    inputs: int
    dtype: mx.Dtype
    name: Role | Literal["norm_add"]
    weight: Weight | None
    """None for `norm_add`."""
    args: tuple[Any, ...]
    """What comes after x and the weight."""
    named: dict[str, Any]


_noted: ContextVar[list[Call] | None] = ContextVar("calls of kernels that are noted", default=None)


def calls_of(run: Callable[[], object]) -> list[Call]:
    """The calls that `run` makes, uncompiled: they are noted, and give zeros."""
    before = _noted.set([])
    try:
        run()
        return _noted.get() or []
    finally:
        _noted.reset(before)


def _norm_add(x: mx.array, norm: Norm, residual: mx.array, *, after: Norm | None = None) -> Any:
    if (noted := _noted.get()) is not None:
        noted.append(Call(x.shape[-1], x.dtype, "norm_add", None, (norm, residual), {"after": after}))
        return residual if after is None else (residual, residual)
    by = norm_add if norm_add.fits(x) and matmul_tuning.takes_end("norm_add") else matmul_reference
    return by.norm_add(x, norm, residual, after=after)


def _prepare(weight: Weight | mx.array, role: Role | None = None) -> Weight:
    weight = small_matmul.prepare(weight)
    if role is not None and isinstance(weight, Dense):
        matmul_choice.tune_body(role, weight, matmul_choice.seconds)
    if role is not None:
        matmul_choice.tune_shape(weight, matmul_choice.shape_seconds)
    if role is not None and isinstance(weight, Packed):
        packed_choice.tune_groups(role, weight, matmul_choice.seconds, packed_choice.agrees)
    if role is not None and isinstance(weight, Dense):
        matmul_choice.tune(role, weight, matmul_choice.seconds, matmul_choice.steady)
        matmul_choice.tune_many(role, weight, matmul_choice.burden, matmul_choice.agrees)
    return weight


def _glu(
    x: mx.array,
    weight: Weight | mx.array,
    *,
    activation: Activation = "silu",
    bias: mx.array | None = None,
    norm: Norm | None = None,
) -> mx.array:
    joined = matmul_reference.product(x, weight, bias, norm)
    fits = epilogues.fits_glu(joined) and matmul_tuning.takes_end("glu")
    gated = epilogues.gated if fits else matmul_reference.gated
    return gated(joined, activation)


def _qkv_rope(
    x: mx.array,
    weight: Weight | mx.array,
    offset: mx.array,
    periods: mx.array | None,
    *shape: int,
    bias: mx.array | None = None,
    norm: Norm | None = None,
    **more: Any,
) -> tuple[mx.array, mx.array, mx.array]:
    joined = matmul_reference.product(x, weight, bias, norm)
    fits = epilogues.fits_heads(shape[-1], periods, joined.dtype) and matmul_tuning.takes_end("qkv_rope")
    heads_of = epilogues.heads_of if fits else matmul_reference.heads_of
    return heads_of(joined, offset, periods, *shape, **more)


def _faster(role: Role) -> Callable[..., Any]:
    """Our kernel, or MLX's operations where they were found to be faster, or our kernel to be wrong."""
    ours, theirs, for_many = (getattr(each, role) for each in (small_matmul, matmul_reference, BY_CUBLAS))

    def call(x: mx.array, weight: Weight | mx.array, *args: Any, **more: Any) -> Any:
        weight, rows = as_weight(weight), x.shape[0]
        if (noted := _noted.get()) is not None:
            noted.append(Call(x.shape[-1], x.dtype, role, weight, args, more))
            return _zeros(role, x, weight, args)
        refused = matmul_tuning.refused(role, weight, rows)
        if matmul_tuning.is_many(rows):
            head = args[-1] if role == "qkv_rope" else 0
            takes = small_matmul.takes_many(weight, head) and not refused
            faster = takes and matmul_tuning.many_by_kernel(role, weight.outputs, weight.inputs, rows)
            return (ours if faster else for_many)(x, weight, *args, **more)
        slower = isinstance(weight, Dense) and matmul_tuning.by_mlx(role, weight.outputs, weight.inputs, rows)
        return (theirs if slower or refused else ours)(x, weight, *args, **more)

    return call


def _zeros(role: Role, x: mx.array, weight: Weight, args: tuple[Any, ...]) -> Any:
    """What a call gives, as far as its shape goes."""
    if role == "qkv_rope":
        *_, heads, groups, size = args
        return tuple(mx.zeros((x.shape[0], count, 1, size), dtype=x.dtype) for count in (heads, groups, groups))
    return mx.zeros((*x.shape[:-1], weight.outputs // (2 if role == "glu" else 1)), dtype=x.dtype)


BY_MLX = FusedMatmuls(
    fits=lambda weight: True,
    fits_heads=lambda size: True,
    prepare=lambda weight, role=None: as_weight(weight),
    matmul=matmul_reference.matmul,
    matmul_add=matmul_reference.matmul_add,
    glu=matmul_reference.glu,
    qkv_rope=matmul_reference.qkv_rope,
    norm_add=matmul_reference.norm_add,
    compile=lambda function: function,
)
BY_MLX_COMPILED = dataclasses.replace(BY_MLX, compile=mx.compile)
BY_CUBLAS = dataclasses.replace(BY_MLX_COMPILED, glu=_glu, qkv_rope=_qkv_rope)
"""For more rows than the kernels take: products by MLX, and what stands after them by our kernels."""
BY_KERNELS = FusedMatmuls(
    fits=small_matmul.fits,
    fits_heads=small_matmul.fits_heads,
    prepare=_prepare,
    matmul=_faster("matmul"),
    matmul_add=_faster("matmul_add"),
    glu=_faster("glu"),
    qkv_rope=_faster("qkv_rope"),
    norm_add=_norm_add,
    compile=matmul_tuning.compiled,
)
