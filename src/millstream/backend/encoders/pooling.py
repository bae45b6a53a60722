"""From hidden states to one vector per input. Owner only."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx


def pool(hidden: mx.array, lengths: mx.array, modes: Sequence[str]) -> mx.array:
    """`lengths`: the tokens of each row; padding comes after them. In float32: sums over long rows need it."""
    hidden = hidden.astype(mx.float32)
    return mx.concatenate([_pool(hidden, lengths, mode) for mode in modes], axis=-1)


def _pool(hidden: mx.array, lengths: mx.array, mode: str) -> mx.array:
    if mode == "cls":
        return hidden[:, 0]
    if mode == "last":
        return hidden[mx.arange(hidden.shape[0]), lengths - 1]
    counts = lengths[:, None].astype(mx.float32)
    keep = (mx.arange(hidden.shape[1])[None, :] < lengths[:, None])[..., None]
    if mode == "max":
        return mx.max(mx.where(keep, hidden, -mx.inf), axis=1)
    if mode == "weighted_mean":
        weights = mx.where(keep, mx.arange(1, hidden.shape[1] + 1)[None, :, None], 0).astype(mx.float32)
        return (hidden * weights).sum(axis=1) / weights.sum(axis=1)
    total = mx.where(keep, hidden, 0).sum(axis=1)
    return total / (mx.sqrt(counts) if mode == "mean_sqrt_len" else counts)


def normalize(vectors: mx.array) -> mx.array:
    return vectors / mx.maximum(mx.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
