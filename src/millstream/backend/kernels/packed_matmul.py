"""Small-batch matmuls with packed weights as CUDA kernels: x @ w.T over MLX's quantised formats, for 1 to 64 rows.

MLX's own kernels read the weight once for each row of a decode step. Here a block unpacks each weight once, in
registers, and multiplies it with all rows. It takes MT tiles of 16 rows of the weight. Its warps take turns along K:
warp v has the chunks v, v + W, v + 2W, …. Packed numbers are a quarter of the traffic, so the rows of x, which every
block reads from the L2 cache, count for more: large weights take more tiles per block.

How a sum is split depends on the weight alone (`Form`), so a row gets the same numbers at every width.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from millstream.backend.kernels.unpack_cuda import MODES, unpack_source

MAX_ROWS = 64
BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = {"affine": (32, 64, 128), "mxfp4": (32,), "nvfp4": (16,), "mxfp8": (32,)}

_HEADER = """
template <int BYTES> __device__ __forceinline__ void mill_fetch_part(void* to, const void* from, int valid) {
  const unsigned at = (unsigned)__cvta_generic_to_shared(to);
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(at), "l"(from), "r"(valid) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" :: "r"(at), "l"(from), "n"(BYTES), "r"(valid)
      : "memory");
}
__device__ __forceinline__ void mill_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void mill_wait() {
  asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory");
}
__device__ __forceinline__ void mill_mma(
    float* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.KIND.KIND.f32 "
    "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
    : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
"""

# The rows of tile m begin at r0 + m % SIDE * 16 + m / SIDE * APART of the weight: SIDE tiles side by side, and as many
# that belong to them (the other halves of heads, the values of gates) APART rows on.
_MATMUL = """
  constexpr int NT = ROWS / 8, WIDE = 16 * MT, LINE = WIDE + 1;
  constexpr int BLOCKS = CK / 32, XB = NT >= 4 ? 2 : (8 / NT < BLOCKS ? 8 / NT : BLOCKS);
  constexpr int RB = CK * BITS / 8, UNITS = RB / 16, PITCH = RB + (BITS == 8 ? 32 : 16);
  constexpr int SIZE = MODE == 0 ? 2 : 1, SB = CK / GS * SIZE, SPITCH = ALIGNED ? SB : SB + 4;
  constexpr int ARRAYS = MODE == 0 ? 2 : 1;
  constexpr int STAGE = WIDE * (PITCH + ARRAYS * SPITCH);
  const int N = w_shape[0], K = w_shape[1] * 32 / BITS, live = x_shape[0];
  const int row_bytes = K * BITS / 8, scale_bytes = K / GS * SIZE, CHUNKS = (K + CK - 1) / CK;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int r0 = blockIdx.x / GROUP * (GROUP * WIDE) + blockIdx.x % GROUP * (16 * SIDE);
  extern __shared__ uint4 shared[];
  char* ring = reinterpret_cast<char*>(shared) + warp * DEPTH * STAGE;
  const char* packed = reinterpret_cast<const char*>(w);
  auto row_of = [&](int i) { return r0 + i / 16 % SIDE * 16 + i / 16 / SIDE * APART + i % 16; };

  // The weight comes from far: DEPTH chunks of it are on their way. A lane fetches what others use, in whole lines.
  auto fetch = [&](int turn) {
    const int chunk = warp + turn * W;
    if (chunk < CHUNKS) {
      char* to = ring + turn % DEPTH * STAGE;
      #pragma unroll
      for (int i = lane; i < WIDE * UNITS; i += 32) {
        const int row = i / UNITS, at = chunk * RB + i % UNITS * 16;
        mill_fetch_part<16>(to + row * PITCH + i % UNITS * 16,
            packed + (size_t)row_of(row) * row_bytes + (at < row_bytes ? at : 0), at < row_bytes ? 16 : 0);
      }
      char* first = to + WIDE * PITCH;
      #pragma unroll
      for (int i = lane; i < WIDE * ARRAYS; i += 32) {
        const char* from = reinterpret_cast<const char*>(SCALES(i / WIDE));
        const size_t at = (size_t)row_of(i % WIDE) * scale_bytes + chunk * SB;
        if constexpr (ALIGNED) {
          mill_fetch_part<SB>(first + i * SPITCH, from + at, SB);
        } else {
          // From the word before, and not beyond the last.
          const size_t end = (size_t)N * scale_bytes;
          #pragma unroll
          for (int part = 0; part < SPITCH; part += 4) {
            const size_t word = (at & ~(size_t)3) + part;
            const int valid = word >= end ? 0 : end - word < 4 ? (int)(end - word) : 4;
            mill_fetch_part<4>(first + i * SPITCH + part, from + (valid ? word : 0), valid);
          }
        }
      }
    }
    mill_commit();
  };
  #pragma unroll
  for (int turn = 0; turn < DEPTH - 1; turn++) fetch(turn);

  // The rows come from the cache: the next blocks' are on their way while this one's are multiplied.
  uint4 b[XB][NT];
  const T* xp = x + (size_t)g * K + t * 8;
  auto read = [&](int turn, int block, uint4* to) {
    const int k = (warp + turn * W) * CK + block * 32;
    #pragma unroll
    for (int n = 0; n < NT; n++)
      to[n] = k < K && n * 8 + g < live ? *reinterpret_cast<const uint4*>(xp + (size_t)n * 8 * K + k)
                                        : make_uint4(0, 0, 0, 0);
  };
  float acc[MT][NT][4] = {};
  const int turns = (CHUNKS - warp + W - 1) / W;
  #pragma unroll
  for (int block = 0; block < XB - 1; block++) read(0, block, b[block]);
  for (int turn = 0; turn < turns; turn++) {
    mill_wait<DEPTH - 2>();
    __syncwarp();  // what all lanes fetched is there, and what they read before may be overwritten
    fetch(turn + DEPTH - 1);
    const char* at = ring + turn % DEPTH * STAGE;
    const int k0 = (warp + turn * W) * CK;
    unsigned scale[MT][2], bias[MT][2];
    #pragma unroll
    for (int block = 0; block < BLOCKS; block++) {
      constexpr int AHEAD = XB - 1;
      read(turn + (block + AHEAD) / BLOCKS, (block + AHEAD) % BLOCKS, b[(block + AHEAD) % XB]);
      if (k0 + block * 32 < K) {
        uint4 row[NT];
        #pragma unroll
        for (int n = 0; n < NT; n++) row[n] = mill_as_packed<BITS>(b[block % XB][n]);
        #pragma unroll
        for (int m = 0; m < MT; m++) {
          unsigned a[2][4];
          #pragma unroll
          for (int h = 0; h < 2; h++) {
            const int i = m * 16 + g + h * 8;
            if (block * 32 % GS == 0 || GS < 32) {
              const char* first = at + WIDE * PITCH + i * SPITCH + (block * 32 + t * 8) / GS * SIZE;
              if constexpr (!ALIGNED) first += ((size_t)row_of(i) * scale_bytes + k0 / GS * SIZE) & 3;
              scale[m][h] = mill_scale<MODE>(first);
              bias[m][h] = MODE == 0 ? mill_scale<MODE>(first + WIDE * SPITCH) : 0;
            }
            mill_unpack<BITS, MODE>(at + i * PITCH + (block * 4 + t) * BITS, scale[m][h], bias[m][h], a[h]);
          }
          #pragma unroll
          for (int n = 0; n < NT; n++) mill_mma(acc[m][n], a[0][0], a[1][0], a[0][1], a[1][1], row[n].x, row[n].y);
          #pragma unroll
          for (int n = 0; n < NT; n++) mill_mma(acc[m][n], a[0][2], a[1][2], a[0][3], a[1][3], row[n].z, row[n].w);
        }
      }
    }
  }
  // The warps' sums, tile by tile, are added where the weight lay.
  float* totals = reinterpret_cast<float*>(shared);
  float* parts = totals + ROWS * LINE;
  #pragma unroll
  for (int m = 0; m < MT; m++) {
    __syncthreads();
    #pragma unroll
    for (int n = 0; n < NT; n++)
      #pragma unroll
      for (int c = 0; c < 4; c++)
        parts[(warp * ROWS + n * 8 + t * 2 + c % 2) * 17 + g + c / 2 * 8] = acc[m][n][c];
    __syncthreads();
    for (int i = threadIdx.x; i < ROWS * 16; i += W * 32) {
      float total = 0.f;
      #pragma unroll
      for (int v = 0; v < W; v++) total += parts[(v * ROWS + i / 16) * 17 + i % 16];
      totals[i / 16 * LINE + m * 16 + i % 16] = total;
    }
  }
  __syncthreads();
  auto sum = [&](int row, int col) { return float(T(totals[row * LINE + col])); };  // rounded, as the product alone
"""

_SINGLE_TILES = "  constexpr int SIDE = MT, GROUP = 1, APART = 0;\n"
_GATE_AND_UP_TILES = "  constexpr int SIDE = MT / 2;\n  const int GROUP = w_shape[0] / WIDE, APART = w_shape[0] / 2;\n"
_HALF_HEAD_TILES = "  constexpr int SIDE = MT / 2, GROUP = D / (16 * MT), APART = D / 2;\n"

_STORE = """
  for (int i = threadIdx.x; i < live * WIDE; i += W * 32) {
    const int row = i / WIDE, col = i % WIDE;
    out[(size_t)row * N + r0 + col] = T(sum(row, col));
  }
"""


@dataclass(frozen=True, slots=True)
class Form:
    """How a weight is packed, and how sums over its rows are split."""

    bits: int
    group_size: int
    mode: str
    chunk: int
    warps: int
    aligned: bool


def _try(x: mx.array, packed: mx.array, scales: mx.array, biases: Any, form: Form, tiles: int, depth: int) -> mx.array:
    rows = -(-x.shape[0] // 8) * 8
    count = packed.shape[0]
    affine = form.mode == "affine"
    names = ["x", "w", "s"] + (["z"] if affine else [])
    pitch = form.chunk * form.bits // 8 + (32 if form.bits == 8 else 16)
    size = 2 if affine else 1
    spitch = form.chunk // form.group_size * size + (0 if form.aligned else 4)
    stage = 16 * tiles * (pitch + (2 if affine else 1) * spitch)
    shared = max(form.warps * depth * stage, 4 * rows * (16 * tiles + 1 + form.warps * 17))
    kernel = mx.fast.cuda_kernel(
        name="millstream_packed",
        input_names=names,
        output_names=["out"],
        source=_SINGLE_TILES + _MATMUL.replace("SCALES(i / WIDE)", "(i < WIDE ? s : z)" if affine else "s") + _STORE,
        header=_HEADER.replace("KIND", "f16" if x.dtype == mx.float16 else "bf16") + unpack_source(x.dtype),
        shared_memory=shared,
    )
    return kernel(
        inputs=[x, packed, scales] + ([biases] if affine else []),
        output_shapes=[(*x.shape[:-1], count)],
        output_dtypes=[x.dtype],
        grid=(count // (16 * tiles) * form.warps * 32, 1, 1),
        threadgroup=(form.warps * 32, 1, 1),
        template=[("T", x.dtype), ("ROWS", rows), ("MT", tiles), ("W", form.warps), ("DEPTH", depth), ("CK", form.chunk),
                  ("BITS", form.bits), ("GS", form.group_size), ("MODE", MODES[form.mode]), ("ALIGNED", form.aligned)],
    )[0]
