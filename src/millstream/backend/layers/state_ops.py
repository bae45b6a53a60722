"""One step of layers that keep a state: CUDA kernels and their MLX reference."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from millstream.backend.kernels import short_conv


@dataclass(frozen=True, slots=True)
class StateOps:
    short_conv: Callable[[mx.array, mx.array, mx.array], tuple[mx.array, mx.array]]
    """(projected, state, weight): see `kernels.short_conv`."""


def _short_conv(projected: mx.array, state: mx.array, weight: mx.array) -> tuple[mx.array, mx.array]:
    before, after, x = mx.split(projected, 3, axis=-1)
    seen = mx.concatenate([state, before * x], axis=1)
    out = mx.sum(seen * weight[:, :, 0].T, axis=1, keepdims=True)
    return after * out, seen[:, 1:]


def short_conv_steps(projected: mx.array, state: mx.array, weight: mx.array) -> tuple[mx.array, mx.array]:
    """Several tokens per row, (rows, length, three times the channels): their output, and all columns that the
    convolution has seen, of which the state after each token is a part."""
    before, after, x = mx.split(projected, 3, axis=-1)
    seen = mx.concatenate([state, before * x], axis=1)
    length, taps = projected.shape[1], weight.shape[1]
    parts = [seen[:, tap : tap + length] * weight[:, tap, 0] for tap in range(taps)]
    return after * functools.reduce(mx.add, parts), seen


BY_MLX = StateOps(short_conv=_short_conv)
BY_KERNELS = StateOps(short_conv=short_conv.short_conv)
