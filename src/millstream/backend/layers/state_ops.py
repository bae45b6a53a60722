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
    short_conv_steps: Callable[[mx.array, mx.array, mx.array, int], tuple[mx.array, mx.array]]
    """(projected, state, weight, length): see `kernels.short_conv`."""
    short_conv_prompts: Callable[[mx.array, mx.array, mx.array], tuple[mx.array, mx.array]]
    """(projected, positions, weight): see `kernels.short_conv`."""


def _short_conv(projected: mx.array, state: mx.array, weight: mx.array) -> tuple[mx.array, mx.array]:
    before, after, x = mx.split(projected, 3, axis=-1)
    seen = mx.concatenate([state, before * x], axis=1)
    out = mx.sum(seen * weight[:, :, 0].T, axis=1, keepdims=True)
    return after * out, seen[:, 1:]


def _short_conv_steps(projected: mx.array, state: mx.array, weight: mx.array, length: int) -> tuple[mx.array, mx.array]:
    rows, flat = state.shape[0], projected.shape[0]
    before, after, x = mx.split(projected[: rows * length].reshape(rows, length, -1), 3, axis=-1)
    seen = mx.concatenate([state, before * x], axis=1)
    parts = [seen[:, tap : tap + length] * weight[:, tap, 0] for tap in range(weight.shape[1])]
    out = (after * functools.reduce(mx.add, parts)).reshape(rows * length, 1, -1)
    return mx.pad(out, [(0, flat - rows * length), (0, 0), (0, 0)]), seen


def _short_conv_prompts(projected: mx.array, positions: mx.array, weight: mx.array) -> tuple[mx.array, mx.array]:
    tokens, taps = projected.shape[0], weight.shape[1]
    before, after, x = mx.split(projected[:, 0], 3, axis=-1)
    columns = mx.pad(before * x, [(taps - 1, 0), (0, 0)])
    parts = []
    for tap in range(taps):
        in_prompt = (positions >= taps - 1 - tap)[:, None]
        parts.append(mx.where(in_prompt, columns[tap : tap + tokens], 0) * weight[:, tap, 0])
    return (after * functools.reduce(mx.add, parts))[:, None], columns


BY_MLX = StateOps(_short_conv, _short_conv_steps, _short_conv_prompts)
BY_KERNELS = StateOps(short_conv.short_conv, short_conv.short_conv_steps, short_conv.short_conv_prompts)
