"""What a layer computes of a batch's few rows: by our CUDA kernels, or by MLX, which says what is meant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from millstream.backend import row_kernels


@dataclass(frozen=True, slots=True)
class RowProducts:
    """See `row_kernels` for what each function gives."""

    fits: Callable[[mx.array], bool]
    fits_heads: Callable[[int], bool]
    product: Callable[[mx.array, mx.array], mx.array]
    added: Callable[[mx.array, mx.array, mx.array], mx.array]
    gated: Callable[[mx.array, mx.array], mx.array]
    turned: Callable[..., tuple[mx.array, mx.array, mx.array]]
    compile: Callable[[Any], Any]
    """A kernel's source is put together at every call, unless the call is part of a compiled function."""


def _product(x: mx.array, weight: mx.array) -> mx.array:
    return x @ weight.T


def _added(x: mx.array, weight: mx.array, residual: mx.array) -> mx.array:
    return residual + x @ weight.T


def _gated(x: mx.array, weight: mx.array) -> mx.array:
    gate, up = mx.split(x @ weight.T, 2, axis=-1)
    out: mx.array = nn.silu(gate) * up
    return out


def _turned(
    x: mx.array, weight: mx.array, offset: mx.array, periods: mx.array, heads: int, groups: int, size: int
) -> tuple[mx.array, mx.array, mx.array]:
    queries, keys, values = split_heads(x @ weight.T, heads, groups, size)
    return turn(queries, offset, periods), turn(keys, offset, periods), values


def split_heads(joined: mx.array, heads: int, groups: int, size: int) -> tuple[mx.array, mx.array, mx.array]:
    """A joined projection of (rows, 1, all) as queries, keys and values of (rows, heads or groups, 1, size)."""
    cuts = [heads * size, (heads + groups) * size]
    queries, keys, values = (part.reshape(part.shape[0], -1, 1, size) for part in mx.split(joined, cuts, axis=-1))
    return queries, keys, values


def turn(x: mx.array, offset: mx.array, periods: mx.array) -> mx.array:
    """The rotary embedding of one token a row."""
    return mx.fast.rope(x, x.shape[-1], traditional=False, base=None, scale=1.0, offset=offset, freqs=periods)


BY_MLX = RowProducts(
    fits=lambda weight: True,
    fits_heads=lambda size: True,
    product=_product,
    added=_added,
    gated=_gated,
    turned=_turned,
    compile=lambda function: function,
)
BY_KERNELS = RowProducts(
    fits=row_kernels.fits,
    fits_heads=row_kernels.fits_heads,
    product=row_kernels.product,
    added=row_kernels.added,
    gated=row_kernels.gated,
    turned=row_kernels.turned,
    compile=mx.compile,
)
