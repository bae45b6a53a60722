"""Attention over a quantised KV cache: by matmuls with packed numbers, or unpacked first.

A prefill chunk is faster unpacked: MLX's matmuls with packed numbers take 6 to 10 times as long on the CPU (128 queries
over 2,000 tokens: 430 to 470 ms against 42 to 50). One query per row is faster with packed matmuls.
"""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx
from mlx_lm.models import base

from millstream.backend.generation.layers.slab_attention import Attention


def packed_matmuls_fit(device: str) -> bool:
    """True where packed matmuls can be trusted. On Metal, MLX had a kernel that skipped columns of heads whose size is
    no multiple of 64 (its issue 4250); on GPUs we have not tried them on caches."""
    return device == "cpu"


def packed_attention(plain: Attention, *, matmuls: bool) -> Attention:
    """An attention function to replace mlx-lm's. `plain` computes it over unpacked keys and values; with `matmuls`, one
    query per row is multiplied with the packed ones. Keys that are not packed are left to it."""

    def attention(
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        if isinstance(keys, mx.array):
            return plain(queries, keys, values, cache, scale, mask, sinks)
        same_size = keys[0].shape[-1] == values[0].shape[-1]  # mlx-lm's function takes this for granted
        if matmuls and queries.shape[2] == 1 and sinks is None and same_size:
            out: mx.array = base.scaled_dot_product_attention(queries, keys, values, cache, scale, mask)
            return out
        unpacked = functools.partial(mx.dequantize, group_size=cache.group_size, bits=cache.bits)
        return plain(queries, unpacked(*keys), unpacked(*values), None, scale, mask, sinks)

    return attention
