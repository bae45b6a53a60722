"""Attention with the exponential of `vector_math` for the softmax, and a matmul for its sums. Imports no mlx-lm."""

from __future__ import annotations

import mlx.core as mx

from millstream.backend.layers.vector_math import LARGE, exp_of_difference

_FLOOR = -1e30


def softmax_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | str | None,
    large: int = LARGE,
    counts: mx.array | None = None,
) -> mx.array:
    """`mask`: None, "causal", True for pairs that attend, or numbers to add. `large`: as for `exp_of_difference`.
    `counts`: of shape (rows, 1, length, 1): 1 for keys that count in the sums, 0 for others. Their values must be 0."""
    rows, heads, count, size = queries.shape
    groups, length = keys.shape[1], keys.shape[2]
    # All queries of a group in one matmul: their keys are read once.
    scores = (queries * scale).reshape(rows, groups, -1, size) @ keys.swapaxes(-1, -2)
    if mask is not None and (count > 1 or not isinstance(mask, str)):
        if isinstance(mask, str):
            mask = mx.arange(length) <= mx.arange(length - count, length)[:, None]
        split = scores.reshape(rows, heads, count, length)
        split = mx.where(mask, split, _FLOOR) if mask.dtype == mx.bool_ else split + mask
        scores = split.reshape(scores.shape)
    weights = exp_of_difference(scores, mx.max(scores, axis=-1, keepdims=True), large)
    total = weights @ (mx.ones((length, 1)) if counts is None else counts)
    return ((weights @ values) / total).reshape(rows, heads, count, values.shape[-1])
