"""Decode attention as a CUDA kernel: one query per row, over rows of unequal length wherever their tokens are.

MLX's CUDA build has no fused kernel for it: with an array mask it falls back to seven launches per layer. This is one,
or two for long rows, for all slabs together: it reads them by address, so a launch does not name every slab. It also
writes the step's keys and values, in place: MLX would copy a whole slab whenever the device still reads it, which is
always, since the device is one step behind.
"""

from __future__ import annotations

import functools
import math
import struct
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

WARPS = 8
SPAN = 512
"""Columns per part, about: see `spans`."""
HEAD_SIZES = (64, 96, 128, 192, 256)

ITEM = 12
"""Integers of a work item:

0. row; -1: nothing to do (padding)
1. slab; -1: the row has no tokens, its output is zero
2. slot
3. capacity of the slot
4. first column, and
5. the column after the last one
6. tokens of the row before column 0
7. 1 if the row's new tokens are written here; 0 for tokens that rows share, of which all columns are read
8. window: 0 for full attention. Otherwise the slot is a ring, in which the token with number p from column 0 on stands
   in column p modulo capacity, and a query sees the last `window` tokens, itself included. A slot that is shorter than
   the window works as a ring that never wraps
9. the row's first item
10. how many items the row has, which follow each other
11. nothing
"""


def spans(capacity: int) -> list[tuple[int, int]]:
    """The columns of a slot, in parts for work items. They depend on the capacity alone, so a row gets the same numbers
    whatever else is in the batch."""
    parts = max(1, round(capacity / SPAN))
    size = -(-capacity // (parts * 32)) * 32
    return [(first, min(capacity, first + size)) for first in range(0, capacity, size)]


# One block per work item and key-value head, all queries of the group at once. Each warp takes every WARPS-th key, two
# at a time, with a running softmax; the results of the warps are joined in shared memory.
_SOURCE = """
  constexpr int E = D / 32;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int head = blockIdx.y, heads = new_k_shape[1];
  const int* item = items + (size_t)blockIdx.x * 8;
  const int row = item[0], slab = item[1];
  // Where the results of this block go: to its row, or to its item, for the kernel that joins parts.
  const size_t place = ((size_t)(PARTED ? blockIdx.x : row) * heads + head) * G;
  if (slab < 0) {
    // A row without tokens: nobody reads it, but it must be a number.
    if constexpr (!PARTED)
      for (int i = threadIdx.x; i < G * D; i += W * 32) out[place * D + i] = T(0.f);
    return;
  }
  const long long* base = (const long long*)addresses + ((size_t)slab * addresses_shape[1] + layer[0]) * 2;
  const size_t begin = ((size_t)item[2] * heads + head) * item[3] * D;
  T* const slab_k = (T*)base[0] + begin;
  T* const slab_v = (T*)base[1] + begin;
  const int first = item[4], end = lengths[row] - item[6];
  const int last = item[7] ? min(end, item[5] - 1) : item[5] - 1;
  if (item[7] && first <= end && end < item[5]) {
    // Nobody else touches this column. MLX knows nothing of this write: it relies on steps being evaluated one by one,
    // so that their launches follow each other.
    const size_t to = (size_t)end * D, from = ((size_t)row * heads + head) * D;
    for (int i = threadIdx.x; i < D; i += W * 32) {
      slab_k[to + i] = new_k[from + i];
      slab_v[to + i] = new_v[from + i];
    }
    __syncthreads();
  }
  float query[G][E], best[G], total[G], sum[G][E];
  const T* from = q + ((size_t)row * heads + head) * G * D + lane * E;
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
  const T* keys = slab_k + lane * E;
  const T* values = slab_v + lane * E;
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
      const size_t at = place + g;
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

# The parts of a row are consecutive items, from starts[row] on.
_JOIN_ITEMS = """
  const int heads = sums_shape[1], row = blockIdx.x / heads, head = blockIdx.x % heads, d = threadIdx.x;
  const int first = starts[row], beyond = starts[row + 1];
  const size_t stride = (size_t)heads * (D + 2);
  const float* from = sums + first * stride + head * (D + 2);
  float top = -1e30f, over = 0.f, under = 0.f;
  for (int p = 0; p < beyond - first; p++) top = fmaxf(top, from[p * stride + D + 1]);
  for (int p = 0; p < beyond - first; p++) {
    const float weight = __expf(from[p * stride + D + 1] - top);
    over += weight * from[p * stride + d];
    under += weight * from[p * stride + D];
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
        name="millstream_slab_decode",
        input_names=["q", "new_k", "new_v", "items", "lengths", "addresses", "layer"],
        output_names=["out"],
        source=_SOURCE,
    )


@functools.cache
def _join_kernel() -> Any:
    return mx.fast.cuda_kernel(name="millstream_join_parts", input_names=["sums"], output_names=["out"], source=_JOIN)


@functools.cache
def _join_items_kernel() -> Any:
    return mx.fast.cuda_kernel(
        name="millstream_join_items", input_names=["sums", "starts"], output_names=["out"], source=_JOIN_ITEMS
    )


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """What the launches of a step read, for all layers of one kind."""

    items: mx.array
    """Work items, sorted by row, (items, ITEM)."""
    parted: bool
    """True if a row may have several items; otherwise item number n is row number n."""
    addresses: mx.array
    """(slabs, layers, parts): where the keys and the values of a layer begin; of a quantised KV cache, the packed
    numbers, scales and biases of the keys, then of the values."""
    lengths: mx.array
    """Tokens of each row before this step."""
    counters: mx.array
    """If `parted`: a zero for each row and key-value head, by which the parts of a row find out which is the last one.
    A launch leaves zeros behind."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How the numbers of a quantised KV cache are packed: MLX's affine form."""

    bits: int
    group_size: int


def decode_fits(queries: mx.array, keys: mx.array, values: mx.array, packing: Packing | None = None) -> bool:
    """True for the shapes that the kernel is written for: one of the known head sizes, groups that fit its registers,
    half precision if keys and values are packed."""
    heads, count, size = queries.shape[1:]
    fits = size == values.shape[-1] and size in HEAD_SIZES and heads // keys.shape[1] * count <= 16
    return fits and (packing is None or (queries.dtype in (mx.bfloat16, mx.float16) and size % 64 == 0))


def slab_decode(
    queries: mx.array,
    new: tuple[mx.array, mx.array],
    work: DecodeWork,
    layer: mx.array,
    scale: float,
    *,
    sinks: mx.array | None = None,
    softcap: float | None = None,
    packing: Packing | None = None,
) -> mx.array:
    """Attention of `queries`, (rows, heads, count, size), over the tokens of each row. The keys and values in `new`,
    (rows, groups, count, size), are written to the slabs first, as the next tokens of each row; a query sees those
    before it and its own. `sinks`: a logit per head that takes weight and gives nothing. `softcap`: scores become
    cap * tanh(score / cap)."""
    attend = _attention(work.parted, scale, softcap, sinks is not None, packing)
    rest = () if sinks is None else (sinks,)
    out: mx.array = attend(queries, *new, work.items, work.lengths, work.addresses, layer, work.counters, *rest)
    return out


@functools.cache
def _attention(parted: bool, scale: float) -> Any:
    """Compiled: else the kernel's source would be assembled at every call, which takes longer than the rest."""
    return mx.compile(functools.partial(_launch, parted, scale))


def _launch(parted: bool, scale: float, queries: mx.array, *rest: mx.array) -> mx.array:
    rows, heads, _, size = queries.shape
    *inputs, starts = rest
    groups, count = inputs[0].shape[1], inputs[2].shape[0]
    # The sums of all warps must fit the 48 KiB of shared memory that a block gets by default.
    share = heads // groups
    warps = min(WARPS, max(1, 40_000 // (4 * share * size)))
    (out,) = _kernel()(
        inputs=[queries, *inputs],
        output_shapes=[(count, heads, size + 2) if parted else queries.shape],
        output_dtypes=[mx.float32 if parted else queries.dtype],
        grid=(warps * 32 * count, groups, 1),
        threadgroup=(warps * 32, 1, 1),
        template=[
            ("T", queries.dtype),
            ("D", size),
            ("G", share),
            ("W", warps),
            ("PARTED", parted),
            ("SCALE", float_bits(scale)),
        ],
    )
    if not parted:
        return out  # type: ignore[no-any-return]
    (joined,) = _join_items_kernel()(
        inputs=[out, starts],
        output_shapes=[queries.shape],
        output_dtypes=[queries.dtype],
        grid=(rows * heads * size, 1, 1),
        threadgroup=(size, 1, 1),
        template=[("T", queries.dtype), ("D", size)],
    )
    return joined  # type: ignore[no-any-return]


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
