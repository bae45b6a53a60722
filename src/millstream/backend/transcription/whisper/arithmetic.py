"""Attention, GELU and the like in the form that is fastest on the device. Owner only.

MLX's own functions everywhere; on x86_64 CPUs those with an exponential go through `vector_math`.
"""

from __future__ import annotations

import platform

import mlx.core as mx
import mlx.nn as nn

from millstream.backend.device import Device
from millstream.backend.layers.cpu_linear import mkl_matmul
from millstream.backend.layers.vector_math import LARGE, exp_in_place, gelu


class Arithmetic:
    """MLX's own functions."""

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | str | None = None
    ) -> mx.array:
        """(rows, heads, positions, values) of each; the result is the same for the queries."""
        scale = queries.shape[-1] ** -0.5
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)

    def gelu(self, x: mx.array) -> mx.array:
        exact: mx.array = nn.gelu(x)
        return exact

    def logsumexp(self, x: mx.array) -> mx.array:
        """Over the last axis."""
        return mx.logsumexp(x, axis=-1)

    def tied_logits(self, hidden: mx.array, embedding: mx.array) -> mx.array:
        return hidden @ embedding.T


class VectorArithmetic(Arithmetic):
    """For x86_64 CPUs and float32."""

    SCORES = 4_000_000
    """Pairs of queries and keys at a time: larger results are new memory each time, which the system clears."""

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | str | None = None
    ) -> mx.array:
        rows, heads, count, size = queries.shape
        length = keys.shape[2]
        if mask is not None or rows * heads * count * length < LARGE:
            return super().attend(queries, keys, values, mask)
        block = max(1, self.SCORES // (rows * heads * length))
        queries, turned, ones = queries * size**-0.5, keys.swapaxes(-1, -2), mx.ones((length, 1))
        parts = []
        for begin in range(0, count, block):
            scores = queries[:, :, begin : begin + block] @ turned
            weights = exp_in_place(scores - scores.max(axis=-1, keepdims=True))
            parts.append((weights @ values) / (weights @ ones))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)

    def gelu(self, x: mx.array) -> mx.array:
        return gelu(x)

    def logsumexp(self, x: mx.array) -> mx.array:
        if x.size < LARGE:
            return super().logsumexp(x)
        most = x.max(axis=-1, keepdims=True)
        total = exp_in_place(x - mx.maximum(most, -1e30)).sum(axis=-1)
        return mx.log(total) + most[..., 0]

    def tied_logits(self, hidden: mx.array, embedding: mx.array) -> mx.array:
        return mkl_matmul(hidden, embedding)


def arithmetic_for(device: Device, disabled: frozenset[str]) -> Arithmetic:
    fast = device.is_cpu and platform.machine() == "x86_64" and "mkl-layout" not in disabled
    return VectorArithmetic() if fast else Arithmetic()
