"""The attention that the models' layers call: over slots when rows decode, over a prompt's own caches when it is read.

MLX's CUDA build has no fused kernel for one query a row over rows of unequal length: with an array mask it falls back
to seven launches a layer. Ours is one. On Metal and on the CPU the masked path of MLX is used.
"""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache

from millstream.backend.exchange import exchange_function
from millstream.backend.prefill_kernel import prefill_attention, prefill_fits
from millstream.backend.prompt_caches import PaddedCache
from millstream.backend.slots import SlotLayer

WARPS = 8
HEAD_SIZES = (64, 96, 128, 192, 256)

# One block a row and key-value head, all queries of the group at once. Each warp takes every WARPS-th key, two at a
# time, and keeps a running softmax; the warps' results are joined in shared memory.
_SOURCE = """
  constexpr int E = D / 32;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int head = blockIdx.y, row = blockIdx.z;
  const int heads = k_shape[1];
  if (row >= k_shape[0]) {
    // A row that has no slot: nobody reads it, but it must be a number.
    for (int i = threadIdx.x; i < G * D; i += W * 32) out[(size_t)(row * heads + head) * G * D + i] = T(0.f);
    return;
  }
  const size_t columns = k_shape[2];
  float query[G][E], best[G], total[G], sum[G][E];
  const T* from = q + (size_t)(row * heads + head) * G * D + lane * E;
  #pragma unroll
  for (int g = 0; g < G; g++) {
    best[g] = -1e30f;
    total[g] = 0.f;
    #pragma unroll
    for (int e = 0; e < E; e++) {
      query[g][e] = float(from[g * D + e]) * scale[0];
      sum[g][e] = 0.f;
    }
  }
  const T* keys = k + (size_t)(row * heads + head) * columns * D + lane * E;
  const T* values = v + (size_t)(row * heads + head) * columns * D + lane * E;
  const int last = end[0];
  for (int j = left[row] + warp; j <= last; j += 2 * W) {
    const bool two = j + W <= last;
    const size_t a = (size_t)j * D, b = (size_t)(two ? j + W : j) * D;
    float ka[E], kb[E], va[E], vb[E];
    #pragma unroll
    for (int e = 0; e < E; e++) {
      ka[e] = float(keys[a + e]);
      kb[e] = float(keys[b + e]);
      va[e] = float(values[a + e]);
      vb[e] = float(values[b + e]);
    }
    #pragma unroll
    for (int g = 0; g < G; g++) {
      float sa = 0.f, sb = 0.f;
      #pragma unroll
      for (int e = 0; e < E; e++) {
        sa += query[g][e] * ka[e];
        sb += query[g][e] * kb[e];
      }
      #pragma unroll
      for (int o = 16; o > 0; o >>= 1) {
        sa += __shfl_xor_sync(0xffffffff, sa, o);
        sb += __shfl_xor_sync(0xffffffff, sb, o);
      }
      const float top = fmaxf(best[g], two ? fmaxf(sa, sb) : sa);
      const float keep = __expf(best[g] - top), pa = __expf(sa - top), pb = two ? __expf(sb - top) : 0.f;
      total[g] = total[g] * keep + pa + pb;
      best[g] = top;
      #pragma unroll
      for (int e = 0; e < E; e++) sum[g][e] = sum[g][e] * keep + pa * va[e] + pb * vb[e];
    }
  }
  __shared__ float all_best[W][G], all_total[W][G], all_sum[W][G][D];
  #pragma unroll
  for (int g = 0; g < G; g++) {
    if (lane == 0) {
      all_best[warp][g] = best[g];
      all_total[warp][g] = total[g];
    }
    #pragma unroll
    for (int e = 0; e < E; e++) all_sum[warp][g][lane * E + e] = sum[g][e];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < G * D; i += W * 32) {
    const int g = i / D, d = i % D;
    float top = -1e30f, over = 0.f, under = 0.f;
    for (int w = 0; w < W; w++) top = fmaxf(top, all_best[w][g]);
    for (int w = 0; w < W; w++) {
      const float weight = __expf(all_best[w][g] - top);
      over += weight * all_sum[w][g][d];
      under += weight * all_total[w][g];
    }
    out[((size_t)(row * heads + head) * G + g) * D + d] = T(over / under);
  }
"""


@functools.cache
def _kernel() -> Any:
    return mx.fast.cuda_kernel(
        name="millstream_ragged_decode",
        input_names=["q", "k", "v", "left", "end", "scale"],
        output_names=["out"],
        source=_SOURCE,
    )


def ragged_attention(
    queries: mx.array, keys: mx.array, values: mx.array, left: mx.array, end: mx.array, scale: mx.array
) -> mx.array:
    """`queries` (rows, heads, 1, size) over the columns `left[row]` to `end`, both included, of whole slot buffers."""
    rows, heads, _, size = queries.shape
    groups = keys.shape[1]
    # The joined sums of all warps have to fit the 48 KiB of shared memory that a block gets unasked.
    share = heads // groups
    warps = min(WARPS, max(1, 40_000 // (4 * share * size)))
    (out,) = _kernel()(
        inputs=[queries, keys, values, left, end, scale],
        output_shapes=[queries.shape],
        output_dtypes=[queries.dtype],
        grid=(warps * 32, groups, rows),
        threadgroup=(warps * 32, 1, 1),
        template=[("T", queries.dtype), ("D", size), ("G", share), ("W", warps)],
    )
    result: mx.array = out
    return result


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """What the models call in place of mlx-lm's function of the same signature, where there are no kernels of ours."""
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
    """The same with our CUDA kernels."""
    if sinks is None and isinstance(cache, SlotLayer):
        slots = cache.slots
        if slots.ragged and _fits(queries, keys, values):
            return ragged_attention(queries, keys, values, slots.left, slots.end_array, slots.scalar(scale))
    elif sinks is None and prefill_fits(queries, keys, values):
        if type(cache) is KVCache and isinstance(mask, str) and mask == "causal":
            return prefill_attention(queries, keys, values, scale, None)
        if isinstance(cache, PaddedCache) and mask is not None and mask is cache.pads.mask:
            return prefill_attention(queries, keys, values, scale, cache.pads.left)
    return attention(queries, keys, values, cache, scale, mask, sinks)


def _over_slots(
    queries: mx.array, keys: mx.array, values: mx.array, cache: SlotLayer, scale: float, sinks: mx.array | None
) -> mx.array:
    """Whole buffers, masked; rows that have no slot get zeros."""
    slots = cache.slots
    inside = queries[: slots.count]
    out: mx.array = base.scaled_dot_product_attention(inside, keys, values, cache, scale, slots.whole_mask(), sinks)
    beyond = queries.shape[0] - slots.count
    return mx.concatenate([out, mx.zeros((beyond, *out.shape[1:]), dtype=out.dtype)]) if beyond else out


def _fits(queries: mx.array, keys: mx.array, values: mx.array) -> bool:
    """What the kernel is written for: one query a row, one size of head, groups that fit its registers."""
    heads, count, size = queries.shape[1:]
    return count == 1 and size == values.shape[-1] and size in HEAD_SIZES and heads // keys.shape[1] <= 16


def adopt_attention(model: Any, *, kernels: bool) -> int:
    """Give the model's attention layers our function; how many have it now."""
    return exchange_function(model, "scaled_dot_product_attention", kernel_attention if kernels else attention)
