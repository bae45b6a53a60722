"""Decode attention as a CUDA kernel: one query per row, over rows of unequal length.

MLX's CUDA build has no fused kernel for it: with an array mask it falls back to seven launches per layer. This is one,
or two for long rows. It also writes the step's keys and values into the slots, in place: MLX would copy a whole buffer
whenever the device still reads it, which is always, since the device is one step behind.
"""

from __future__ import annotations

import functools
import math
import struct
from typing import Any

import mlx.core as mx

WARPS = 8
SPAN = 512
"""Columns per part."""
HEAD_SIZES = (64, 96, 128, 192, 256)

# One block per row and key-value head, all queries of the group at once. Each warp takes every WARPS-th key, two at a
# time, with a running softmax; the results of the warps are joined in shared memory.
_SOURCE = """
  constexpr int E = D / 32;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int head = blockIdx.y, row = blockIdx.z;
  const int heads = k_shape[1], part = blockIdx.x;
  const size_t place = (size_t)(row * heads + head) * G;
  if (row >= k_shape[0]) {
    // A row that has no slot: nobody reads it, but it must be a number.
    if constexpr (PARTED) {
      for (int i = threadIdx.x; i < G * (D + 2); i += W * 32)
        out[((place + i / (D + 2)) * gridDim.x + part) * (D + 2) + i % (D + 2)] = 0.f;
    } else {
      for (int i = threadIdx.x; i < G * D; i += W * 32) out[place * D + i] = T(0.f);
    }
    return;
  }
  const size_t columns = k_shape[2];
  if (!PARTED || end[0] / SPAN == part) {
    // Nobody else touches this row's last column. MLX knows nothing of this write: it relies on steps being evaluated
    // one by one, so that their launches follow each other.
    const size_t to = ((size_t)(row * heads + head) * columns + end[0]) * D, from = (size_t)(row * heads + head) * D;
    for (int i = threadIdx.x; i < D; i += W * 32) {
      const_cast<T*>(k)[to + i] = new_k[from + i];
      const_cast<T*>(v)[to + i] = new_v[from + i];
    }
    __syncthreads();
  }
  float query[G][E], best[G], total[G], sum[G][E];
  const T* from = q + place * D + lane * E;
  #pragma unroll
  for (int g = 0; g < G; g++) {
    best[g] = -1e30f;
    total[g] = 0.f;
    #pragma unroll
    for (int e = 0; e < E; e++) {
      query[g][e] = float(from[g * D + e]) * __int_as_float(SCALE);
      sum[g][e] = 0.f;
    }
  }
  const T* keys = k + (size_t)(row * heads + head) * columns * D + lane * E;
  const T* values = v + (size_t)(row * heads + head) * columns * D + lane * E;
  // Its own part of the columns; one part is all of them.
  const int last = PARTED ? min(end[0], part * SPAN + SPAN - 1) : end[0];
  const int first = PARTED ? max(left[row], part * SPAN) : left[row];
  for (int j = first + warp; j <= last; j += 2 * W) {
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
    if constexpr (PARTED) {
      // Sums of every part, then each part's weight and greatest score, for the kernel that joins them.
      const size_t at = (place + g) * gridDim.x + part;
      out[at * (D + 2) + d] = over;
      if (d == 0) {
        out[at * (D + 2) + D] = under;
        out[at * (D + 2) + D + 1] = top;
      }
    } else {
      out[(place + g) * D + d] = T(over / under);
    }
  }
"""

_JOIN = """
  const int parts = sums_shape[1], d = threadIdx.x;
  const float* from = sums + (size_t)blockIdx.x * parts * (D + 2);
  float top = -1e30f, over = 0.f, under = 0.f;
  for (int p = 0; p < parts; p++) top = fmaxf(top, from[p * (D + 2) + D + 1]);
  for (int p = 0; p < parts; p++) {
    const float weight = __expf(from[p * (D + 2) + D + 1] - top);
    over += weight * from[p * (D + 2) + d];
    under += weight * from[p * (D + 2) + D];
  }
  out[(size_t)blockIdx.x * D + d] = T(under > 0.f ? over / under : 0.f);
"""


def float_bits(value: float) -> int:
    """The bits of a float32 as an integer: a kernel's template takes no other numbers."""
    bits: int = struct.unpack("i", struct.pack("f", value))[0]
    return bits


@functools.cache
def _kernel() -> Any:
    return mx.fast.cuda_kernel(
        name="millstream_ragged_decode",
        input_names=["q", "k", "v", "left", "end", "new_k", "new_v"],
        output_names=["out"],
        source=_SOURCE,
    )


@functools.cache
def _join_kernel() -> Any:
    return mx.fast.cuda_kernel(name="millstream_join_parts", input_names=["sums"], output_names=["out"], source=_JOIN)


def decode_fits(queries: mx.array, keys: mx.array, values: mx.array) -> bool:
    """True for the shapes that the kernel is written for: one query per row, one of the known head sizes, groups that
    fit its registers."""
    heads, count, size = queries.shape[1:]
    return count == 1 and size == values.shape[-1] and size in HEAD_SIZES and heads // keys.shape[1] <= 16


def ragged_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    left: mx.array,
    end: mx.array,
    new: tuple[mx.array, mx.array],
    used: int,
    scale: float,
) -> mx.array:
    """Attention of `queries`, (rows, heads, 1, size), over the columns `left[row]` to `end`, both included, of whole
    slot buffers. The keys and values in `new`, (rows, groups, 1, size), are written to column `end` first.

    `used` is end + 1, known without asking the device: rows over many columns are computed in parts, one block each.
    """
    parts = -(-used // SPAN) if used > 2 * SPAN else 1
    out: mx.array = _attention(parts, scale)(queries, keys, values, left, end, *new)
    return out


@functools.cache
def _attention(parts: int, scale: float) -> Any:
    """Compiled: else the kernel's source would be assembled at every call, which takes longer than the rest."""
    return mx.compile(functools.partial(_in_parts, parts, scale))


def _in_parts(parts: int, scale: float, queries: mx.array, keys: mx.array, *rest: mx.array) -> mx.array:
    rows, heads, _, size = queries.shape
    groups = keys.shape[1]
    # The sums of all warps must fit the 48 KiB of shared memory that a block gets by default.
    share = heads // groups
    warps = min(WARPS, max(1, 40_000 // (4 * share * size)))
    (out,) = _kernel()(
        inputs=[queries, keys, *rest],
        output_shapes=[queries.shape if parts == 1 else (rows, heads, parts, size + 2)],
        output_dtypes=[queries.dtype if parts == 1 else mx.float32],
        grid=(warps * 32 * parts, groups, rows),
        threadgroup=(warps * 32, 1, 1),
        template=[
            ("T", queries.dtype),
            ("D", size),
            ("G", share),
            ("W", warps),
            ("SPAN", SPAN),
            ("PARTED", parts > 1),
            ("SCALE", float_bits(scale)),
        ],
    )
    return out if parts == 1 else join_parts(out, queries.shape, queries.dtype)


def join_parts(sums: mx.array, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Attention of `shape` from its parts, (…, parts, size + 2): sums, their weight, the greatest score."""
    size = shape[-1]
    (out,) = _join_kernel()(
        inputs=[sums.reshape(-1, *sums.shape[-2:])],
        output_shapes=[shape],
        output_dtypes=[dtype],
        grid=(math.prod(shape), 1, 1),
        threadgroup=(size, 1, 1),
        template=[("T", dtype), ("D", size)],
    )
    result: mx.array = out
    return result
