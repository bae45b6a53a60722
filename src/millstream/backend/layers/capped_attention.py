"""Attention whose scores are capped, as Gemma 2's are: cap * tanh(score / cap). MLX's function has no such scores.

With MLX's own operations, for every device; our CUDA kernels cap scores themselves. Imports no mlx-lm.
"""

from __future__ import annotations

import mlx.core as mx


def cap_scores(scores: mx.array, cap: float) -> mx.array:
    return mx.tanh(scores / cap) * cap


def capped_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | str | None,
    cap: float,
    sinks: mx.array | None = None,
) -> mx.array:
    """`mask`: None, "causal", True for pairs that attend, or numbers to add; of four dimensions, or fewer. `sinks`: a
    logit per head that takes weight."""
    rows, heads, count, size = queries.shape
    groups, length = keys.shape[1], keys.shape[2]
    # All queries of a group in one matmul: their keys are read once.
    scores = (queries * scale).reshape(rows, groups, -1, size) @ keys.swapaxes(-1, -2)
    scores = cap_scores(scores, cap).reshape(rows, heads, count, length)
    if isinstance(mask, str):
        mask = mx.arange(length) <= mx.arange(length - count, length)[:, None]
    if mask is not None:
        scores = mx.where(mask, scores, mx.finfo(scores.dtype).min) if mask.dtype == mx.bool_ else scores + mask
    if sinks is None:
        weights = mx.softmax(scores, axis=-1, precise=True)
    else:
        sink = mx.broadcast_to(sinks[None, :, None, None], (*scores.shape[:-1], 1)).astype(scores.dtype)
        weights = mx.softmax(mx.concatenate([sink, scores], axis=-1), axis=-1, precise=True)[..., 1:]
    out = weights.reshape(rows, groups, -1, length) @ values
    return out.reshape(rows, heads, count, values.shape[-1])
