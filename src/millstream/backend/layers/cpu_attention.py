"""Attention for x86_64 CPUs, where MLX's softmax is scalar code: 34 of the 40 ns for each pair of a query and a key.

It computes the softmax with the exponential of `vector_math`, and its sums with a matmul.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models import base

from millstream.backend.layers.vector_math import LARGE, exp_in_place

_FLOOR = -1e30


def cpu_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """Replaces mlx-lm's function of the same signature in the layers of a model."""
    if sinks is not None or hasattr(cache, "bits") or not _pays(queries, keys) or not _is_supported(mask):
        out: mx.array = base.scaled_dot_product_attention(queries, keys, values, cache, scale, mask, sinks)
        return out
    rows, heads, count, size = queries.shape
    groups, length = keys.shape[1], keys.shape[2]
    # All queries of a group in one matmul: their keys are read once.
    scores = (queries * scale).reshape(rows, groups, -1, size) @ keys.swapaxes(-1, -2)
    if mask is not None and (count > 1 or not isinstance(mask, str)):
        if isinstance(mask, str):
            mask = mx.arange(length) <= mx.arange(length - count, length)[:, None]
        scores = mx.where(mask, scores.reshape(rows, heads, count, length), _FLOOR).reshape(scores.shape)
    weights = exp_in_place(scores - mx.max(scores, axis=-1, keepdims=True))
    total = weights @ mx.ones((length, 1))
    return ((weights @ values) / total).reshape(rows, heads, count, values.shape[-1])


def _pays(queries: mx.array, keys: mx.array) -> bool:
    """True if there are enough pairs of queries and keys: those of a decode step are faster in one call of MLX."""
    rows, heads, count, _ = queries.shape
    return queries.dtype == mx.float32 and rows * heads * count * keys.shape[2] >= LARGE


def _is_supported(mask: Any) -> bool:
    return mask is None or (mask == "causal" if isinstance(mask, str) else mask.dtype == mx.bool_)
