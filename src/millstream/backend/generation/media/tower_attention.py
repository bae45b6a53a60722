"""Slices the attention of an encoder tower into parts that can be evaluated one by one.

In a language model the chunk length bounds the work of a step. In a tower every patch attends to every other one at
once: on a CPU, 1,024 patches and 4 heads take 170 ms, in which no running row gets a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.models import base

from millstream.backend.layers.patch_layers import patch_function

MAX_PAIRS = 2**19
"""Queries times keys per slice, over all heads: as many as 128 queries of 1,024 patches and 4 heads have."""

Record = Callable[[mx.array, float], None]
"""Called with the output of every slice and its approximate number of multiplications."""

Attend = Callable[..., mx.array]


def in_slices(attend: Attend, record: Record) -> Attend:
    """The same function, computed for some queries at a time. Queries are independent, so the result is the same."""

    def call(q: mx.array, k: mx.array, v: mx.array, scale: float, mask: Any = None) -> mx.array:
        count, pairs = q.shape[-2], q.size // q.shape[-1] * k.shape[-2]
        if pairs <= MAX_PAIRS:
            out = attend(q, k, v, scale=scale, mask=mask)
            record(out, 2.0 * pairs * q.shape[-1])
            return out
        step = max(1, count * MAX_PAIRS // pairs)
        outs: list[mx.array] = []
        for start in range(0, count, step):
            queries = slice(start, start + step)
            mask_slice = mask[..., queries, :] if mask is not None and mask.shape[-2] == count else mask
            outs.append(attend(q[..., queries, :], k, v, scale=scale, mask=mask_slice))
            record(outs[-1], 2.0 * step / count * pairs * q.shape[-1])
        return mx.concatenate(outs, axis=-2)

    return call


class _Fast:
    """`mx.fast` with another attention."""

    def __init__(self, attend: Attend) -> None:
        self.scaled_dot_product_attention = attend

    def __getattr__(self, name: str) -> Any:
        return getattr(mx.fast, name)


class _Core:
    """`mlx.core` with that `fast`, as the layers of a tower see it."""

    def __init__(self, attend: Attend) -> None:
        self.fast = _Fast(attend)

    def __getattr__(self, name: str) -> Any:
        return getattr(mx, name)


def slice_attention(tower: nn.Module, record: Record) -> int:
    """Slice the attention of the tower's layers, through either function that they call. Returns how many layers."""
    core: Any = _Core(in_slices(mx.fast.scaled_dot_product_attention, record))
    patched = patch_function(tower, "mx", core, "scaled_dot_product_attention")
    return patched + patch_function(tower, "ensure_fused_sdpa", in_slices(base.ensure_fused_sdpa, record))
