"""The attention that the layers of a model call: over slabs in a decode step, over a prompt's own caches in prefill.

On CUDA both have custom kernels. On Metal and on the CPU MLX's own attention is used.
"""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from millstream.backend.generation.caches.class_caches import SlabLayer
from millstream.backend.generation.caches.flat_caches import FlatCache
from millstream.backend.generation.caches.kernel_slabs import KernelStep
from millstream.backend.generation.caches.own_attention import OwnAttention
from millstream.backend.generation.caches.prompt_caches import PaddedCache, PaddedPackedCache
from millstream.backend.generation.caches.window_masks import window_of
from millstream.backend.generation.layers.capped_layers import adopt_capped_layers
from millstream.backend.generation.layers.packed_attention import packed_attention
from millstream.backend.generation.layers.slab_attention import slab_attention
from millstream.backend.kernels.decode_attention import decode_fits, slab_decode
from millstream.backend.kernels.prefill_attention import prefill_attention, prefill_fits
from millstream.backend.layers.patch_layers import patch_function

attention = slab_attention(base.scaled_dot_product_attention)
"""Replaces mlx-lm's function of the same signature, without custom kernels."""
packed = slab_attention(packed_attention(base.scaled_dot_product_attention, matmuls=False))
"""The same over a quantised KV cache."""


def kernel_attention(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
    softcap: float | None = None,
) -> mx.array:
    """Replaces mlx-lm's function of the same signature, with our CUDA kernels where they fit."""
    if isinstance(cache, OwnAttention):
        return cache.attend(kernel_attention, queries, keys, values, scale, mask, sinks=sinks, softcap=softcap)
    if isinstance(cache, FlatCache) and prefill_fits(queries, keys, values):
        flat = functools.partial(
            prefill_attention, scale=scale, left=cache.prompts.firsts, window=cache.window, flat=True
        )
        return cache.attend(flat, queries, keys, values, sinks=sinks, softcap=softcap)
    if isinstance(cache, SlabLayer) and isinstance(step := cache.caches.step, KernelStep):
        new = cache.take_new(keys, values, mask)
        packing = cache.packing
        if not decode_fits(queries, keys, values, packing):
            raise ValueError("the decode kernel does not take its heads")
        layer = step.layer_numbers[cache.index]
        return slab_decode(queries, new, step.work, layer, scale, sinks=sinks, softcap=softcap, packing=packing)
    if isinstance(cache, SlabLayer):
        return (attention if cache.packing is None else packed)(
            queries, keys, values, cache, scale, mask, sinks, softcap
        )
    if isinstance(cache, FlatCache):
        return attention(queries, keys, values, cache, scale, mask, sinks, softcap)
    if not isinstance(keys, mx.array):
        unpacked = functools.partial(mx.dequantize, group_size=cache.group_size, bits=cache.bits)
        keys, values = unpacked(*keys), unpacked(*values)
    seen = _seen(cache, mask)
    if seen is not None and prefill_fits(queries, keys, values):
        left, window = seen
        return prefill_attention(queries, keys, values, scale, left, window=window, sinks=sinks, softcap=softcap)
    plain = None if isinstance(cache, QuantizedKVCache | PaddedPackedCache) else cache
    return attention(queries, keys, values, plain, scale, mask, sinks, softcap)


def _seen(cache: Any, mask: Any) -> tuple[mx.array | None, int] | None:
    """What the queries of a chunk see, if the prefill kernel can tell it: the first key of each row, and how many up to
    its own; 0 for all."""
    if isinstance(cache, PaddedCache | PaddedPackedCache):
        return (cache.padding.left, 0) if mask is not None and mask is cache.padding.mask else None
    if type(cache) in (KVCache, QuantizedKVCache):
        return (None, 0) if isinstance(mask, str) and mask == "causal" else None
    window = window_of(cache, mask)
    return None if window is None else (None, window)


def adopt_attention(model: Any, attend: Any) -> int:
    """Have the model's attention layers call one of the functions above. Returns how many do."""
    return patch_function(model, "scaled_dot_product_attention", attend) + adopt_capped_layers(model, attend)
