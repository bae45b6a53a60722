"""Prefill attention as a CUDA kernel: a chunk of a prompt over all tokens before it.

MLX's CUDA build has two ways: cuDNN, which plans for 80 ms at each new length, or six launches per layer with all
scores in memory, in buffers of a new size for every chunk. This takes any length, with scores in registers.
"""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx

from millstream.backend.kernels.compiled import cuda_kernel
from millstream.backend.kernels.decode_attention import float_bits, join_parts
from millstream.backend.kernels.multiprocessors import multiprocessors

HEAD_SIZES = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
"""Of keys and of values."""
BLOCKS, SPAN = 3, 512
"""A chunk of a long prompt has few queries and many keys. If it makes fewer blocks than this for each multiprocessor,
its keys are split into parts of at least SPAN: a block alone on a multiprocessor waits for every load."""

TILES = {64: (2, 64), 96: (2, 32), 128: (2, 32), 192: (1, 16), 256: (1, 16)}
"""By the size of a head's keys: how many times 16 queries each of a block's four warps takes, and how many keys it
reads at a time. Twice as many queries halve the reads of shared memory, which bound the speed, as long as registers
last."""

_HEADER = """
__device__ __forceinline__ void mill_copy(unsigned to, const void* from, unsigned bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(bytes));
}
__device__ __forceinline__ void mill_commit() { asm volatile("cp.async.commit_group;"); }
template <int N> __device__ __forceinline__ void mill_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(N)); }
__device__ __forceinline__ void mill_mma(
    float* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.KIND.KIND.f32 "
    "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
    : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ unsigned mill_pack(float low, float high) {
  unsigned r;
  asm("cvt.rn.KINDx2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ float mill_power(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
__device__ __forceinline__ void mill_read(unsigned* b, unsigned from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
    : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(from));
}
__device__ __forceinline__ void mill_read_turned(unsigned* b, unsigned from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
    : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(from));
}
"""

# S = Q K' and O = P V on tensor cores, KEYS keys at a time, with a running softmax. `left[row]`: a row's first key;
# if FLAT, `left[q]` is the first key of query q of a single row.
# With WINDOW, a query sees the last so many keys up to its own, and tiles that none of a block sees are not read.
_SOURCE = r"""
  constexpr int PITCH = D + 8, PITCH_V = DV + 8, QUERIES = 64 * M, KSTEPS = D / 16, OTILES = DV / 8;
  constexpr int STAGES = KEYS * D <= 4096 ? 2 : 1;
  __shared__ __align__(16) unsigned short tile_k[STAGES][KEYS * PITCH], tile_v[STAGES][KEYS * PITCH_V];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int heads = q_shape[1], count = q_shape[2], groups = k_shape[1], length = k_shape[2];
  const int head = blockIdx.y, row = blockIdx.z, group = head / (heads / groups);
  // The last block first: it has the most keys to read. In parts, several blocks share out the keys of one.
  const int tiles = (count + QUERIES - 1) / QUERIES, parts = gridDim.x / tiles, part = blockIdx.x % parts;
  const int begin = (tiles - 1 - blockIdx.x / parts) * QUERIES;
  const unsigned short* keys = (const unsigned short*)k + row * k_strides[0] + group * k_strides[1];
  const unsigned short* values = (const unsigned short*)v + row * v_strides[0] + group * v_strides[1];
  const unsigned short* queries = (const unsigned short*)q + row * q_strides[0] + head * q_strides[1];
  const int key_stride = k_strides[2], value_stride = v_strides[2];
  const int before = length - count;
  const int* bounds = (const int*)left;
  const int low = FLAT ? bounds[begin] : left_ndim == 1 ? bounds[row] : 0;
  const int beyond = min(length, before + begin + QUERIES);
  const int mine = begin + warp * 16 * M + lane / 4;
  // The first key of each of this thread's queries, and of the warp's last one: they never decrease.
  int lows[M][2];
  #pragma unroll
  for (int i = 0; i < 2 * M; i++) lows[i / 2][i % 2] = FLAT ? bounds[min(mine + i * 8, count - 1)] : low;
  const int last_low = FLAT ? bounds[min(begin + (warp + 1) * 16 * M - 1, count - 1)] : low;

  unsigned qf[M][KSTEPS][4];
  #pragma unroll
  for (int m = 0; m < M; m++) {
    #pragma unroll
    for (int s = 0; s < KSTEPS; s++) {
      #pragma unroll
      for (int p = 0; p < 4; p++) {
        const int at = mine + m * 16 + (p % 2) * 8, d = s * 16 + (p / 2) * 8 + (lane % 4) * 2;
        qf[m][s][p] = at < count ? *(const unsigned*)(queries + (long long)at * q_strides[2] + d) : 0u;
      }
    }
  }
  float out_sum[M][OTILES][4], best[M][2], total[M][2];
  #pragma unroll
  for (int m = 0; m < M; m++) {
    best[m][0] = best[m][1] = -1e30f;
    total[m][0] = total[m][1] = 0.f;
    #pragma unroll
    for (int t = 0; t < OTILES; t++) out_sum[m][t][0] = out_sum[m][t][1] = out_sum[m][t][2] = out_sum[m][t][3] = 0.f;
  }

  const unsigned at_k = __cvta_generic_to_shared(&tile_k[0][0]), at_v = __cvta_generic_to_shared(&tile_v[0][0]);
  // One tile of keys or of values: `parts` times 16 bytes of each, zeros beyond the last.
  auto fetch_one = [&](const unsigned short* source, int stride, unsigned to, int from, int parts) {
    source += (long long)from * stride;
    #pragma unroll
    for (int j = 0; j < KEYS * parts / 128; j++) {
      const int i = threadIdx.x + j * 128, key = i / parts, piece = (i % parts) * 8;
      const bool there = from + key < length;
      mill_copy(to + (key * (parts * 8 + 8) + piece) * 2, source + (there ? key : 0) * stride + piece, there ? 16 : 0);
    }
  };
  auto fetch = [&](int from, int stage) {
    fetch_one(keys, key_stride, at_k + stage * KEYS * PITCH * 2, from, D / 8);
    fetch_one(values, value_stride, at_v + stage * KEYS * PITCH_V * 2, from, DV / 8);
    mill_commit();
  };

  const float scale = __int_as_float(SCALE) * 1.4426950408889634f;
  const int lowest = WINDOW ? max(low, before + begin - WINDOW + 1) : low;
  const int first = lowest / KEYS * KEYS, span = ((beyond - first + KEYS - 1) / KEYS + parts - 1) / parts * KEYS;
  const int start = first + part * span, high = min(beyond, start + span);
  // Where this thread's addresses for ldmatrix begin, in the tile of keys and in that of values.
  const unsigned read_k = at_k + (((lane / 16) * 8 + lane % 8) * PITCH + ((lane / 8) % 2) * 8) * 2;
  const unsigned read_v = at_v + ((((lane / 8) % 2) * 8 + lane % 8) * PITCH_V + (lane / 16) * 8) * 2;
  if (start < high) fetch(start, 0);
  int stage = 0;
  for (int from = start; from < high; from += KEYS) {
    const bool more = from + KEYS < high;
    if (STAGES == 2 && more) {
      fetch(from + KEYS, stage ^ 1);
      mill_wait<1>();
    } else {
      mill_wait<0>();
    }
    __syncthreads();
    const unsigned tile = stage * KEYS * PITCH * 2, tile_of_values = stage * KEYS * PITCH_V * 2;
    float score[M][KEYS / 8][4];
    #pragma unroll
    for (int m = 0; m < M; m++) {
      #pragma unroll
      for (int n = 0; n < KEYS / 8; n++) score[m][n][0] = score[m][n][1] = score[m][n][2] = score[m][n][3] = 0.f;
    }
    #pragma unroll
    for (int s = 0; s < KSTEPS; s++) {
      #pragma unroll
      for (int n = 0; n < KEYS / 8; n += 2) {
        unsigned b[4];
        mill_read(b, read_k + tile + (n * 8 * PITCH + s * 16) * 2);
        #pragma unroll
        for (int m = 0; m < M; m++) {
          const unsigned* a = qf[m][s];
          mill_mma(score[m][n], a[0], a[1], a[2], a[3], b[0], b[1]);
          mill_mma(score[m][n + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
        }
      }
    }
    if constexpr (CAP != 0) {
      constexpr float LOG2E = 1.4426950408889634f;
      const float cap = __int_as_float(CAP) / __int_as_float(SCALE);
      #pragma unroll
      for (int m = 0; m < M; m++)
        #pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
          #pragma unroll
          for (int c = 0; c < 4; c++)
            score[m][n][c] = cap - 2.f * cap / (mill_power(2.f * LOG2E / cap * score[m][n][c]) + 1.f);
    }
    const int own = before + begin + warp * 16 * M;  // of this warp's first query
    if (from < last_low || from + KEYS > own + 1 || (WINDOW && from <= own + 16 * M - 1 - WINDOW)) {
      #pragma unroll
      for (int m = 0; m < M; m++) {
        #pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
          #pragma unroll
          for (int c = 0; c < 4; c++) {
            const int key = from + n * 8 + (lane % 4) * 2 + c % 2;
            const int at = before + mine + m * 16 + (c / 2) * 8;
            if (key < lows[m][c / 2] || key > at || (WINDOW && key <= at - WINDOW)) score[m][n][c] = -1e30f;
          }
        }
      }
    }
    #pragma unroll
    for (int m = 0; m < M; m++) {
      float top[2] = {best[m][0], best[m][1]}, base[2], keep[2];
      #pragma unroll
      for (int n = 0; n < KEYS / 8; n++) {
        top[0] = fmaxf(top[0], fmaxf(score[m][n][0], score[m][n][1]));
        top[1] = fmaxf(top[1], fmaxf(score[m][n][2], score[m][n][3]));
      }
      #pragma unroll
      for (int h = 0; h < 2; h++) {
        top[h] = fmaxf(top[h], __shfl_xor_sync(0xffffffff, top[h], 1));
        top[h] = fmaxf(top[h], __shfl_xor_sync(0xffffffff, top[h], 2));
        keep[h] = mill_power((best[m][h] - top[h]) * scale);
        best[m][h] = top[h];
        // A query that has seen no key yet: its scores are all the same floor, and must weigh nothing.
        base[h] = top[h] > -1e29f ? top[h] * scale : 0.f;
        total[m][h] *= keep[h];
      }
      #pragma unroll
      for (int n = 0; n < KEYS / 8; n++) {
        #pragma unroll
        for (int c = 0; c < 4; c++) {
          score[m][n][c] = mill_power(fmaf(score[m][n][c], scale, -base[c / 2]));
          total[m][c / 2] += score[m][n][c];
        }
      }
      if (__any_sync(0xffffffff, keep[0] != 1.f || keep[1] != 1.f)) {
        #pragma unroll
        for (int t = 0; t < OTILES; t++) {
          out_sum[m][t][0] *= keep[0];
          out_sum[m][t][1] *= keep[0];
          out_sum[m][t][2] *= keep[1];
          out_sum[m][t][3] *= keep[1];
        }
      }
    }
    #pragma unroll
    for (int s = 0; s < KEYS / 16; s++) {
      unsigned p[M][4];
      #pragma unroll
      for (int m = 0; m < M; m++) {
        p[m][0] = mill_pack(score[m][2 * s][0], score[m][2 * s][1]);
        p[m][1] = mill_pack(score[m][2 * s][2], score[m][2 * s][3]);
        p[m][2] = mill_pack(score[m][2 * s + 1][0], score[m][2 * s + 1][1]);
        p[m][3] = mill_pack(score[m][2 * s + 1][2], score[m][2 * s + 1][3]);
      }
      #pragma unroll
      for (int t = 0; t < OTILES; t += 2) {
        unsigned b[4];
        mill_read_turned(b, read_v + tile_of_values + (s * 16 * PITCH_V + t * 8) * 2);
        #pragma unroll
        for (int m = 0; m < M; m++) {
          const unsigned* a = p[m];
          mill_mma(out_sum[m][t], a[0], a[1], a[2], a[3], b[0], b[1]);
          mill_mma(out_sum[m][t + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
        }
      }
    }
    __syncthreads();
    if (STAGES == 2) stage ^= 1;
    else if (more) fetch(from + KEYS, 0);
  }
  #pragma unroll
  for (int i = 0; i < 2 * M; i++) {
    const int m = i / 2, h = i % 2;
    total[m][h] += __shfl_xor_sync(0xffffffff, total[m][h], 1);
    total[m][h] += __shfl_xor_sync(0xffffffff, total[m][h], 2);
    if (SINKS && part == 0) {
      // As one more key, whose value is zero.
      const float sink = float(((const T*)sinks)[head]) / __int_as_float(SCALE), top = fmaxf(best[m][h], sink);
      const float keep = mill_power((best[m][h] - top) * scale);
      total[m][h] = total[m][h] * keep + mill_power((sink - top) * scale);
      best[m][h] = top;
      #pragma unroll
      for (int t = 0; t < OTILES; t++) {
        out_sum[m][t][2 * h] *= keep;
        out_sum[m][t][2 * h + 1] *= keep;
      }
    }
    const float share = total[m][h] > 0.f ? 1.f / total[m][h] : 0.f;
    const int at = mine + m * 16 + h * 8;
    if (parts > 1 && at < count) {
      // For the kernel that joins parts: sums, their weight, and the greatest score.
      float* to = sums + (((size_t)(row * (size_t)count + at) * heads + head) * parts + part) * (DV + 2);
      #pragma unroll
      for (int t = 0; t < OTILES; t++) {
        to[t * 8 + (lane % 4) * 2] = out_sum[m][t][2 * h];
        to[t * 8 + (lane % 4) * 2 + 1] = out_sum[m][t][2 * h + 1];
      }
      if (lane % 4 == 0) {
        to[DV] = total[m][h];
        to[DV + 1] = best[m][h] > -1e29f ? best[m][h] * __int_as_float(SCALE) : -1e30f;
      }
    } else if (at < count) {
      unsigned short* to = (unsigned short*)out + ((size_t)(row * (size_t)count + at) * heads + head) * DV;
      #pragma unroll
      for (int t = 0; t < OTILES; t++)
        *(unsigned*)(to + t * 8 + (lane % 4) * 2) =
          mill_pack(out_sum[m][t][2 * h] * share, out_sum[m][t][2 * h + 1] * share);
    }
  }
"""


@functools.cache
def _kernel(kind: str) -> Any:
    return cuda_kernel(
        name="millstream_prefill",
        input_names=["q", "k", "v", "left", "sinks"],
        output_names=["out", "sums"],
        source=_SOURCE,
        header=_HEADER.replace("KIND", kind),
        ensure_row_contiguous=False,
    )


def prefill_fits(queries: mx.array, keys: mx.array, values: mx.array) -> bool:
    """True for what the kernel is written for: half-precision types, and one of the usual head sizes."""
    half = queries.dtype in (mx.bfloat16, mx.float16)
    same = queries.dtype == keys.dtype == values.dtype
    return half and same and (queries.shape[-1], values.shape[-1]) in HEAD_SIZES


def prefill_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    left: mx.array | None,
    *,
    window: int = 0,
    sinks: mx.array | None = None,
    softcap: float | None = None,
    flat: bool = False,
) -> mx.array:
    """Causal attention of the last `queries.shape[2]` positions over all keys, from `left[row]` on where it is given,
    or over the last `window` of them. `sinks` and `softcap`: as for `slab_decode`.

    `flat`: `left` has the first key of each query of a single row, in an order that does not decrease.

    Keys and values may be slices of longer buffers.
    """
    rows, heads, count, size = queries.shape
    times, keys_at_once = TILES[size]
    tiles = -(-count // (64 * times))
    read = min(keys.shape[2], window + count) if window else keys.shape[2]
    wanted = BLOCKS * multiprocessors() // (tiles * heads * rows)
    parts = 1 if left is not None else max(1, min(wanted, read // SPAN))
    shape = (rows, count, heads, values.shape[-1])
    # One kernel with and without `left` and parts: compiling one takes seconds. So all inputs have the same type.
    out, sums = _kernel("bf16" if queries.dtype == mx.bfloat16 else "f16")(
        inputs=[
            queries,
            keys,
            values,
            queries if left is None else left.view(queries.dtype),
            queries if sinks is None else sinks.astype(queries.dtype),
        ],
        output_shapes=[shape if parts == 1 else (1,), (1,) if parts == 1 else (*shape[:3], parts, shape[3] + 2)],
        output_dtypes=[queries.dtype, mx.float32],
        grid=(tiles * parts * 128, heads, rows),
        threadgroup=(128, 1, 1),
        template=[
            ("T", queries.dtype),
            ("D", size),
            ("DV", values.shape[-1]),
            ("M", times),
            ("KEYS", keys_at_once),
            ("WINDOW", window),
            ("SINKS", sinks is not None),
            ("FLAT", flat),
            ("CAP", float_bits(softcap or 0.0)),
            ("SCALE", float_bits(scale)),
        ],
    )
    # In memory it is (rows, count, heads, size), as the output projection reads it.
    joined: mx.array = out if parts == 1 else join_parts(sums, shape, queries.dtype)
    return joined.transpose(0, 2, 1, 3)
