"""The attention that the layers of a model call: over slabs in a decode step, over a prompt's own caches in prefill.

On CUDA both have custom kernels. On Metal and on the CPU MLX's own attention is used.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache

from millstream.backend.generation.caches.class_caches import SlabLayer
from millstream.backend.generation.caches.kernel_slabs import KernelStep
from millstream.backend.generation.caches.prompt_caches import PaddedCache
from millstream.backend.generation.layers.slab_attention import slab_attention
from millstream.backend.kernels.decode_attention import decode_fits, slab_decode
from millstream.backend.kernels.prefill_attention import prefill_attention, prefill_fits
from millstream.backend.layers.patch_layers import patch_function

attention = slab_attention(base.scaled_dot_product_attention)
"""Replaces mlx-lm's function of the same signature, without custom kernels."""


def kernel_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
    softcap: float | None = None,
) -> mx.array:
    """Replaces mlx-lm's function of the same signature, with our CUDA kernels where they fit."""
    if isinstance(cache, SlabLayer) and isinstance(step := cache.caches.step, KernelStep):
        new = cache.take_new(keys, values, mask)
        packing = cache.packing
        if not decode_fits(queries, keys, values, packing):
            raise ValueError("the decode kernel does not take its heads")
        layer = step.layer_numbers[cache.index]
        return slab_decode(queries, new, step.work, layer, scale, sinks=sinks, softcap=softcap, packing=packing)
    if sinks is None and softcap is None and prefill_fits(queries, keys, values):
        if type(cache) is KVCache and isinstance(mask, str) and mask == "causal":
            return prefill_attention(queries, keys, values, scale, None)
        if isinstance(cache, PaddedCache) and mask is not None and mask is cache.padding.mask:
            return prefill_attention(queries, keys, values, scale, cache.padding.left)
    return attention(queries, keys, values, cache, scale, mask, sinks, softcap)


def adopt_attention(model: Any, attend: Any) -> int:
    """Have the model's attention layers call one of the functions above. Returns how many do."""
    return patch_function(model, "scaled_dot_product_attention", attend)
