"""The attention that the layers of a model call: over slots in a decode step, over a prompt's own caches in prefill.

On CUDA both have custom kernels. On Metal and on the CPU MLX's attention with a mask is used.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache

from millstream.backend.generation.caches.prompt_caches import PaddedCache
from millstream.backend.generation.caches.slots import Parts, SlotLayer
from millstream.backend.kernels.decode_attention import decode_fits, ragged_attention
from millstream.backend.kernels.prefill_attention import prefill_attention, prefill_fits
from millstream.backend.layers.patch_layers import patch_function


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """Replaces mlx-lm's function of the same signature, without custom kernels."""
    if isinstance(cache, SlotLayer) and (new := _new_column(cache, keys, values, mask)) is not None:
        keys, values = cache.write_column(new)
    if isinstance(cache, SlotLayer) and cache.slots.ragged:
        return _over_slots(queries, keys, values, cache, scale, sinks)
    out: mx.array = base.scaled_dot_product_attention(queries, keys, values, cache, scale, mask, sinks)
    return out


def kernel_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """Replaces mlx-lm's function of the same signature, with our CUDA kernels where they fit."""
    if sinks is None and isinstance(cache, SlotLayer):
        slots = cache.slots
        if decode_fits(queries, keys, values) and (new := _new_column(cache, keys, values, mask)) is not None:
            (keys, values), fresh = cache.parts, (new[0], new[1])
            return ragged_attention(queries, keys, values, slots.starts, slots.end_array, fresh, slots.end + 1, scale)
    elif sinks is None and prefill_fits(queries, keys, values):
        if type(cache) is KVCache and isinstance(mask, str) and mask == "causal":
            return prefill_attention(queries, keys, values, scale, None)
        if isinstance(cache, PaddedCache) and mask is not None and mask is cache.padding.mask:
            return prefill_attention(queries, keys, values, scale, cache.padding.left)
    return attention(queries, keys, values, cache, scale, mask, sinks)


def _new_column(cache: SlotLayer, keys: mx.array, values: mx.array, mask: Any) -> Parts | None:
    """The step's column of keys and values, if attention is to write it. Raises `ValueError` if a layer passes other
    keys, values or a mask of its own, as layers with latent vectors do: attention reads what the slots hold."""
    new = cache.take_new_column()
    if new is not None and (keys is not new[0] or values is not new[1] or mask is not None):
        raise ValueError("its layers do not pass the keys and values of the cache on to attention")
    return new


def _over_slots(
    queries: mx.array, keys: mx.array, values: mx.array, cache: SlotLayer, scale: float, sinks: mx.array | None
) -> mx.array:
    """Over the whole buffers, with a mask; rows that have no slot get zeros."""
    slots = cache.slots
    inside = queries[: slots.count]
    out: mx.array = base.scaled_dot_product_attention(inside, keys, values, cache, scale, slots.full_mask(), sinks)
    beyond = queries.shape[0] - slots.count
    return mx.concatenate([out, mx.zeros((beyond, *out.shape[1:]), dtype=out.dtype)]) if beyond else out


def adopt_attention(model: Any, attend: Any) -> int:
    """Have the model's attention layers call one of the functions above. Returns how many do."""
    return patch_function(model, "scaled_dot_product_attention", attend)
