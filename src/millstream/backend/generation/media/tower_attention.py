"""The attention of a vision tower, cut into pieces that can be evaluated one by one.

In a language model a chunk bounds what a step computes. A tower has every patch attend to every other one at once: on a
CPU 1,024 patches and 4 heads take 170 ms, in which no running row gets a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.models import base

from millstream.backend.layers.patch_layers import patch_function

PAIRS = 2**19
"""Queries times keys of a piece, all heads together: as much as 128 queries of 1,024 patches and 4 heads."""

Note = Callable[[mx.array, float], None]
"""Is told of every piece, and about how many multiplications it takes."""

Attend = Callable[..., mx.array]


def in_pieces(attend: Attend, note: Note) -> Attend:
    """The same function, computed for some queries at a time. Each query's result is its own, so nothing changes."""

    def call(q: mx.array, k: mx.array, v: mx.array, scale: float, mask: Any = None) -> mx.array:
        count, pairs = q.shape[-2], q.size // q.shape[-1] * k.shape[-2]
        if pairs <= PAIRS:
            out = attend(q, k, v, scale=scale, mask=mask)
            note(out, 2.0 * pairs * q.shape[-1])
            return out
        step = max(1, count * PAIRS // pairs)
        outs: list[mx.array] = []
        for start in range(0, count, step):
            rows = slice(start, start + step)
            piece = mask[..., rows, :] if mask is not None and mask.shape[-2] == count else mask
            outs.append(attend(q[..., rows, :], k, v, scale=scale, mask=piece))
            note(outs[-1], 2.0 * step / count * pairs * q.shape[-1])
        return mx.concatenate(outs, axis=-2)

    return call


class _Fast:
    """`mx.fast` with another attention."""

    def __init__(self, attend: Attend) -> None:
        self.scaled_dot_product_attention = attend

    def __getattr__(self, name: str) -> Any:
        return getattr(mx.fast, name)


class _Core:
    """`mlx.core` as a layer sees it, with that."""

    def __init__(self, attend: Attend) -> None:
        self.fast = _Fast(attend)

    def __getattr__(self, name: str) -> Any:
        return getattr(mx, name)


def cut_attention(tower: nn.Module, note: Note) -> int:
    """Have the tower's layers call it in pieces, in either of the ways that they call it; how many do."""
    plain = in_pieces(mx.fast.scaled_dot_product_attention, note)
    core: Any = _Core(plain)
    found = patch_function(tower, "mx", core, also="scaled_dot_product_attention")
    return found + patch_function(tower, "ensure_fused_sdpa", in_pieces(base.ensure_fused_sdpa, note))
