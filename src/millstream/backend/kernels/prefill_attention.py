"""Prefill attention as a CUDA kernel: a chunk of a prompt over all tokens before it.

MLX's CUDA build has two ways: cuDNN, which plans for 80 ms at each new length, or six launches per layer with all
scores in memory, in buffers of a new size for every chunk. This takes any length, with scores in registers.
"""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx

from millstream.backend.kernels.decode_attention import float_bits, join_parts

HEAD_SIZES = (64, 96, 128)
QUERIES = 64
"""Queries per block: 16 for each of its four warps."""
BLOCKS, SPAN = 396, 512
"""A chunk of a long prompt has few queries and many keys. If it makes fewer blocks than this, three for each core of an
H200, its keys are split into parts of at least SPAN: a block alone on its core waits for every load."""

# S = Q K' and O = P V on tensor cores, 64 keys at a time, with a running softmax. `left[row]`: the first key of a row.
_SOURCE = r"""
  constexpr int KEYS = 64, PITCH = D + 8, STAGES = D <= 64 ? 2 : 1;
  constexpr int KSTEPS = D / 16, OTILES = D / 8, PARTS = D / 8;
  __shared__ __align__(16) unsigned short tile_k[STAGES][KEYS * PITCH], tile_v[STAGES][KEYS * PITCH];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int heads = q_shape[1], count = q_shape[2], groups = k_shape[1], length = k_shape[2];
  const int head = blockIdx.y, row = blockIdx.z, group = head / (heads / groups);
  // The last block first: it has the most keys to read. In parts, several blocks share out the keys of one.
  const int tiles = (count + 63) / 64, parts = gridDim.x / tiles, part = blockIdx.x % parts;
  const int begin = (tiles - 1 - blockIdx.x / parts) * 64;
  const unsigned short* keys = (const unsigned short*)k + row * k_strides[0] + group * k_strides[1];
  const unsigned short* values = (const unsigned short*)v + row * v_strides[0] + group * v_strides[1];
  const unsigned short* queries = (const unsigned short*)q + row * q_strides[0] + head * q_strides[1];
  const int before = length - count;
  const int low = LEFT ? ((const int*)left)[row] : 0;
  const int beyond = min(length, before + begin + 64);
  const int mine = begin + warp * 16 + lane / 4;

  unsigned qf[KSTEPS][4];
  #pragma unroll
  for (int s = 0; s < KSTEPS; s++) {
    #pragma unroll
    for (int p = 0; p < 4; p++) {
      const int at = mine + (p % 2) * 8, d = s * 16 + (p / 2) * 8 + (lane % 4) * 2;
      qf[s][p] = at < count ? *(const unsigned*)(queries + (long long)at * q_strides[2] + d) : 0u;
    }
  }
  float out_sum[OTILES][4], best[2] = {-1e30f, -1e30f}, total[2] = {0.f, 0.f};
  #pragma unroll
  for (int t = 0; t < OTILES; t++) out_sum[t][0] = out_sum[t][1] = out_sum[t][2] = out_sum[t][3] = 0.f;

  auto fetch = [&](int from, int stage) {
    for (int i = threadIdx.x; i < KEYS * PARTS; i += 128) {
      const int key = i / PARTS, part = (i % PARTS) * 8, at = from + key;
      const int bytes = at < length ? 16 : 0;
      const long long where = at < length ? at : 0;
      const unsigned dk = __cvta_generic_to_shared(&tile_k[stage][key * PITCH + part]);
      const unsigned dv = __cvta_generic_to_shared(&tile_v[stage][key * PITCH + part]);
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::
        "r"(dk), "l"(keys + where * k_strides[2] + part), "r"(bytes));
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::
        "r"(dv), "l"(values + where * v_strides[2] + part), "r"(bytes));
    }
    asm volatile("cp.async.commit_group;");
  };
  #define MILLSTREAM_MMA(TYPE) \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 " \
      "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};" \
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
  auto multiply = [](float* c, const unsigned* a, unsigned b0, unsigned b1) {
    if constexpr (BRAIN) MILLSTREAM_MMA("bf16");
    else MILLSTREAM_MMA("f16");
  };
  auto pack = [](float x, float y) {
    unsigned r;
    if constexpr (BRAIN) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(y), "f"(x));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(y), "f"(x));
    return r;
  };

  const float scale = __int_as_float(SCALE) * 1.4426950408889634f;
  const int first = low / KEYS * KEYS, span = ((beyond - first + KEYS - 1) / KEYS + parts - 1) / parts * KEYS;
  const int start = first + part * span, high = min(beyond, start + span);
  if (start < high) fetch(start, 0);
  int stage = 0;
  for (int from = start; from < high; from += KEYS) {
    const bool more = from + KEYS < high;
    if (STAGES == 2 && more) {
      fetch(from + KEYS, stage ^ 1);
      asm volatile("cp.async.wait_group 1;");
    } else {
      asm volatile("cp.async.wait_group 0;");
    }
    __syncthreads();
    const unsigned short* tk = tile_k[stage];
    const unsigned short* tv = tile_v[stage];
    float score[KEYS / 8][4];
    #pragma unroll
    for (int n = 0; n < KEYS / 8; n++) score[n][0] = score[n][1] = score[n][2] = score[n][3] = 0.f;
    #pragma unroll
    for (int s = 0; s < KSTEPS; s++) {
      #pragma unroll
      for (int n = 0; n < KEYS / 8; n += 2) {
        unsigned b[4];
        const unsigned at = __cvta_generic_to_shared(
          tk + (n * 8 + (lane / 16) * 8 + lane % 8) * PITCH + s * 16 + ((lane / 8) % 2) * 8);
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
          : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(at));
        multiply(score[n], qf[s], b[0], b[1]);
        multiply(score[n + 1], qf[s], b[2], b[3]);
      }
    }
    const bool whole = from >= low && from + KEYS <= before + begin + warp * 16 + 1;
    float top[2] = {best[0], best[1]};
    #pragma unroll
    for (int n = 0; n < KEYS / 8; n++) {
      #pragma unroll
      for (int c = 0; c < 4; c++) {
        const int key = from + n * 8 + (lane % 4) * 2 + c % 2;
        const bool seen = whole || (key >= low && key <= before + mine + (c / 2) * 8);
        score[n][c] = seen ? score[n][c] * scale : -1e30f;
        top[c / 2] = fmaxf(top[c / 2], score[n][c]);
      }
    }
    float keep[2];
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      top[h] = fmaxf(top[h], __shfl_xor_sync(0xffffffff, top[h], 1));
      top[h] = fmaxf(top[h], __shfl_xor_sync(0xffffffff, top[h], 2));
      keep[h] = exp2f(best[h] - top[h]);
      best[h] = top[h];
      total[h] *= keep[h];
    }
    #pragma unroll
    for (int n = 0; n < KEYS / 8; n++) {
      #pragma unroll
      for (int c = 0; c < 4; c++) {
        // A query that has seen no key yet: its scores are all the same floor, and must weigh nothing.
        score[n][c] = score[n][c] <= -1e30f ? 0.f : exp2f(score[n][c] - best[c / 2]);
        total[c / 2] += score[n][c];
      }
    }
    #pragma unroll
    for (int t = 0; t < OTILES; t++) {
      out_sum[t][0] *= keep[0];
      out_sum[t][1] *= keep[0];
      out_sum[t][2] *= keep[1];
      out_sum[t][3] *= keep[1];
    }
    #pragma unroll
    for (int s = 0; s < KEYS / 16; s++) {
      const unsigned p[4] = {
        pack(score[2 * s][0], score[2 * s][1]), pack(score[2 * s][2], score[2 * s][3]),
        pack(score[2 * s + 1][0], score[2 * s + 1][1]), pack(score[2 * s + 1][2], score[2 * s + 1][3])};
      #pragma unroll
      for (int t = 0; t < OTILES; t += 2) {
        unsigned b[4];
        const unsigned at = __cvta_generic_to_shared(
          tv + (s * 16 + ((lane / 8) % 2) * 8 + lane % 8) * PITCH + t * 8 + (lane / 16) * 8);
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
          : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(at));
        multiply(out_sum[t], p, b[0], b[1]);
        multiply(out_sum[t + 1], p, b[2], b[3]);
      }
    }
    __syncthreads();
    if (STAGES == 2) stage ^= 1;
    else if (more) fetch(from + KEYS, 0);
  }
  #pragma unroll
  for (int h = 0; h < 2; h++) {
    total[h] += __shfl_xor_sync(0xffffffff, total[h], 1);
    total[h] += __shfl_xor_sync(0xffffffff, total[h], 2);
    const float share = total[h] > 0.f ? 1.f / total[h] : 0.f;
    const int at = mine + h * 8;
    if (PARTED && at < count) {
      // For the kernel that joins parts: sums, their weight, and the greatest score.
      float* to = (float*)out + (((size_t)(row * (size_t)count + at) * heads + head) * parts + part) * (D + 2);
      #pragma unroll
      for (int t = 0; t < OTILES; t++) {
        to[t * 8 + (lane % 4) * 2] = out_sum[t][2 * h];
        to[t * 8 + (lane % 4) * 2 + 1] = out_sum[t][2 * h + 1];
      }
      if (lane % 4 == 0) {
        to[D] = total[h];
        to[D + 1] = best[h] * 0.6931471805599453f;
      }
    } else if (at < count) {
      unsigned short* to = (unsigned short*)out + ((size_t)(row * (size_t)count + at) * heads + head) * D;
      #pragma unroll
      for (int t = 0; t < OTILES; t++)
        *(unsigned*)(to + t * 8 + (lane % 4) * 2) = pack(out_sum[t][2 * h] * share, out_sum[t][2 * h + 1] * share);
    }
  }
"""


@functools.cache
def _kernel() -> Any:
    return mx.fast.cuda_kernel(
        name="millstream_prefill",
        input_names=["q", "k", "v", "left"],
        output_names=["out"],
        source=_SOURCE,
        ensure_row_contiguous=False,
    )


def prefill_fits(queries: mx.array, keys: mx.array, values: mx.array) -> bool:
    """True for what the kernel is written for: half-precision types, and one of the usual head sizes."""
    half = queries.dtype in (mx.bfloat16, mx.float16)
    same = queries.dtype == keys.dtype == values.dtype and queries.shape[-1] == values.shape[-1]
    return half and same and queries.shape[-1] in HEAD_SIZES


def prefill_attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, left: mx.array | None
) -> mx.array:
    """Causal attention of the last `queries.shape[2]` positions over all keys, from `left[row]` on where it is given.

    Keys and values may be slices of longer buffers.
    """
    rows, heads, count, size = queries.shape
    tiles = -(-count // QUERIES)
    parts = 1 if left is not None else max(1, min(BLOCKS // (tiles * heads * rows), keys.shape[2] // SPAN))
    shape = (rows, count, heads, size)
    (out,) = _kernel()(
        inputs=[queries, keys, values, queries if left is None else left],
        output_shapes=[shape if parts == 1 else (rows, count, heads, parts, size + 2)],
        output_dtypes=[queries.dtype if parts == 1 else mx.float32],
        grid=(tiles * parts * 128, heads, rows),
        threadgroup=(128, 1, 1),
        template=[
            ("D", size),
            ("BRAIN", queries.dtype == mx.bfloat16),
            ("LEFT", left is not None),
            ("PARTED", parts > 1),
            ("SCALE", float_bits(scale)),
        ],
    )
    # In memory it is (rows, count, heads, size), as the output projection reads it.
    joined: mx.array = out if parts == 1 else join_parts(out, shape, queries.dtype)
    return joined.transpose(0, 2, 1, 3)
