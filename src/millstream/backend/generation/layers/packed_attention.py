"""Attention over quantised keys and values: multiplied as they are, or unpacked first.

A chunk of a prompt is better off unpacked: MLX's products with packed numbers take 6 to 10 times as long on the CPU
(128 queries over 2,000 tokens: 430 to 470 ms against 42 to 50). One query a row is better off with packed products.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models import base

Attention = Callable[..., mx.array]
"""mlx-lm's `scaled_dot_product_attention`, or one of ours with its signature."""


def products_fit(device: str) -> bool:
    """Where the packed products are to be trusted. On Metal MLX had a kernel that left out columns of heads that are no
    multiple of 64 (its issue 4250); on GPUs we have not tried them on caches."""
    return device == "cpu"


def packed_attention(plain: Attention, *, products: bool) -> Attention:
    """What the models call in place of mlx-lm's function. `plain` is for keys and values that are not packed;
    `products`: multiply packed ones, for one query a row."""

    def attention(
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        alike = keys[0].shape[-1] == values[0].shape[-1]  # which is what mlx-lm's function takes for granted
        if products and queries.shape[2] == 1 and sinks is None and alike:
            out: mx.array = base.scaled_dot_product_attention(queries, keys, values, cache, scale, mask)
            return out
        unpacked = functools.partial(mx.dequantize, group_size=cache.group_size, bits=cache.bits)
        return plain(queries, unpacked(*keys), unpacked(*values), None, scale, mask, sinks)

    return attention
