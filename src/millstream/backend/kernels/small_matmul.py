"""Small-batch matmuls as CUDA kernels: x @ w.T for the few rows of a decode step, fused with the next operation.

MLX has cuBLAS compute such a matmul inside a captured graph, which costs the host 18 us (H200); one of these kernels
costs 4. A decode step on a large GPU waits for its host.

A block takes one or two tiles of 16 rows of the weight, and its warps split K. Both operands lie along K, so a thread
loads 16 bytes of each, and the same order of K on both sides feeds two mma m16n8k16. How the sums of a row are split
depends on the weight alone: a row gets the same numbers whatever else is in the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from millstream.backend.kernels.weights import Dense, Norm, Weight, as_weight

WIDTHS = (32, 64)
"""How many rows a pass may have. Compiling a width takes seconds, so there are two: 8 rows take as long as 32."""
MAX_WEIGHT_ROWS = 32768
"""Weights with more rows than this (output layers) are left to cuBLAS, which is faster there."""

_HEADER = """
__device__ __forceinline__ void mill_fetch(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
    :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from) : "memory");
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

# Tile m of a block begins at row r0 + m * APART of the weight. GROUP blocks side by side cover GROUP * 16 rows, so with
# APART = GROUP * 16 tiles that belong together (both halves of a head, a gate and its value) are in one block. The size
# of the weight is no constant: compiling a kernel takes seconds, and a model has many sizes.
_MATMUL = """
  constexpr int NT = ROWS / 8, LINE = 16 * MT + 1;
  const int N = w_shape[0], K = w_shape[1], KW = K / W;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int r0 = blockIdx.x / GROUP * (GROUP * 16 * MT) + blockIdx.x % GROUP * 16;
  float acc[MT][NT][4] = {};
  const T* wp = w + (size_t)(r0 + g) * K + warp * KW + t * 8;
  const T* xp = x + (size_t)g * K + warp * KW + t * 8;
  // The weight comes from far: DEPTH chunks of it are on their way. Each thread fetches what it uses itself.
  extern __shared__ uint4 ring[];
  constexpr int TH = W * 32;
  const int CHUNKS = KW / 32;
  auto fetch = [&](int chunk) {
    if (chunk < CHUNKS) {
      #pragma unroll
      for (int m = 0; m < MT; m++) {
        const T* from = wp + (size_t)m * APART * K + chunk * 32;
        uint4* to = ring + ((chunk % DEPTH * MT + m) * 2) * TH + threadIdx.x;
        mill_fetch(to, from);
        mill_fetch(to + TH, from + (size_t)8 * K);
      }
    }
    mill_commit();
  };
  #pragma unroll
  for (int c = 0; c < DEPTH - 1; c++) fetch(c);
  // The rows come from the cache: the next chunk's are on their way while this one's are multiplied.
  uint4 b[2][NT];
  auto read = [&](int chunk) {
    if (chunk < CHUNKS) {
      #pragma unroll
      for (int n = 0; n < NT; n++)
        b[chunk % 2][n] = *reinterpret_cast<const uint4*>(xp + (size_t)n * 8 * K + chunk * 32);
    }
  };
  read(0);
  #pragma unroll 2
  for (int c = 0; c < CHUNKS; c++) {
    uint4 a[MT][2];
    read(c + 1);
    mill_wait<DEPTH - 2>();
    #pragma unroll
    for (int m = 0; m < MT; m++) {
      const uint4* at = ring + ((c % DEPTH * MT + m) * 2) * TH + threadIdx.x;
      a[m][0] = at[0];
      a[m][1] = at[TH];
    }
    fetch(c + DEPTH - 1);
    #pragma unroll
    for (int n = 0; n < NT; n++)
      #pragma unroll
      for (int m = 0; m < MT; m++) {
        const uint4 row = b[c % 2][n];
        mill_mma(acc[m][n], a[m][0].x, a[m][1].x, a[m][0].y, a[m][1].y, row.x, row.y);
        mill_mma(acc[m][n], a[m][0].z, a[m][1].z, a[m][0].w, a[m][1].w, row.z, row.w);
      }
  }
  // The warps' sums: a line a row of x, one float more against bank conflicts. They lie where the weight lay.
  __syncthreads();
  float* sums = reinterpret_cast<float*>(ring);
  float* mine = sums + warp * ROWS * LINE;
  #pragma unroll
  for (int m = 0; m < MT; m++)
    #pragma unroll
    for (int n = 0; n < NT; n++)
      #pragma unroll
      for (int c = 0; c < 4; c++)
        mine[(n * 8 + t * 2 + c % 2) * LINE + m * 16 + g + c / 2 * 8] = acc[m][n][c];
  __syncthreads();
  auto sum = [&](int row, int col) {
    float total = 0.f;
    #pragma unroll
    for (int v = 0; v < W; v++) total += sums[(v * ROWS + row) * LINE + col];
    return float(T(total));  // rounded, as the product alone would be
  };
"""

_SINGLE_TILES = "  constexpr int GROUP = 1, APART = 16;\n"
_GATE_AND_UP_TILES = "  const int GROUP = w_shape[0] / 32, APART = w_shape[0] / 2;\n"
_HALF_HEAD_TILES = "  constexpr int GROUP = D / 32, APART = D / 2;\n"

_STORE = """
  for (int i = threadIdx.x; i < ROWS * 16 * MT; i += W * 32) {
    const int row = i / (16 * MT), col = i % (16 * MT);
    out[(size_t)row * N + r0 + col] = T(sum(row, col));
  }
"""

_ADD = """
  for (int i = threadIdx.x; i < ROWS * 16 * MT; i += W * 32) {
    const int row = i / (16 * MT), col = i % (16 * MT);
    const size_t at = (size_t)row * N + r0 + col;
    out[at] = T(sum(row, col) + float(r[at]));
  }
"""

_SWIGLU = """
  for (int i = threadIdx.x; i < ROWS * 16; i += W * 32) {
    const int row = i / 16, col = i % 16;
    const float gate = sum(row, col), up = sum(row, col + 16);
    out[(size_t)row * (N / 2) + r0 + col] = T(float(T(gate / (1.f + __expf(-gate)))) * up);
  }
"""

_ROPE = """
  const int head = r0 / D, first = r0 % D;
  for (int i = threadIdx.x; i < ROWS * 16; i += W * 32) {
    const int row = i / 16, col = i % 16, d = first + col;
    float one = sum(row, col), two = sum(row, col + 16);
    if (head < H + KV) {
      float sine, cosine;
      sincosf(float(offset[row]) * (1.f / periods[d]), &sine, &cosine);
      const float turned = one * cosine - two * sine;
      two = two * cosine + one * sine;
      one = turned;
    }
    T* to = head < H ? q + ((size_t)row * H + head) * D
        : head < H + KV ? keys + ((size_t)row * KV + head - H) * D : values + ((size_t)row * KV + head - H - KV) * D;
    to[d] = T(one);
    to[d + D / 2] = T(two);
  }
"""


@dataclass(frozen=True, slots=True)
class _Kind:
    """One of the kernels: `tiles` per block, at most so many `warps`, `depth` chunks in flight. The numbers were the
    fastest on an H200, and a block stays below the 99 KiB of shared memory that every GPU from sm_80 on has."""

    name: str
    inputs: tuple[str, ...]
    epilogue: str
    tiles: int
    warps: int
    depth: int
    tiling: str = _SINGLE_TILES
    outputs: tuple[str, ...] = ("out",)

    def warps_for(self, size: int) -> int:
        """As many warps as can split rows of this size."""
        warps = self.warps
        while size % (32 * warps):
            warps //= 2
        return warps

    def shared_bytes(self, rows: int, warps: int) -> int:
        """For the ring buffer of the weight, which later holds the sums of the warps."""
        ring = self.depth * self.tiles * 2 * warps * 32 * 16
        return max(ring, warps * rows * (16 * self.tiles + 1) * 4)


_NARROW_KIND = _Kind("matmul", ("x", "w"), _STORE, tiles=1, warps=16, depth=3)
_WIDE_KIND = _Kind("wide_matmul", ("x", "w"), _STORE, tiles=2, warps=8, depth=4)
_ADD_KIND = _Kind("matmul_add", ("x", "w", "r"), _ADD, tiles=1, warps=16, depth=3)
_SWIGLU_KIND = _Kind("swiglu_matmul", ("x", "w"), _SWIGLU, tiles=2, warps=4, depth=6, tiling=_GATE_AND_UP_TILES)
_ROPE_KIND = _Kind(
    "qkv_rope",
    ("x", "w", "offset", "periods"),
    _ROPE,
    tiles=2,
    warps=8,
    depth=4,
    tiling=_HALF_HEAD_TILES,
    outputs=("q", "keys", "values"),
)
KINDS = (_NARROW_KIND, _WIDE_KIND, _ADD_KIND, _SWIGLU_KIND, _ROPE_KIND)
WIDE_WEIGHT_ROWS = 3072
"""From so many rows of a weight on, a block with one tile would have too little work."""


@functools.cache
def _kernel(kind: _Kind, dtype: mx.Dtype, shared: int) -> Any:
    return mx.fast.cuda_kernel(
        name=f"millstream_{kind.name}",
        input_names=list(kind.inputs),
        output_names=list(kind.outputs),
        source=kind.tiling + _MATMUL + kind.epilogue,
        header=_HEADER.replace("KIND", "f16" if dtype == mx.float16 else "bf16"),
        shared_memory=shared,
    )


def _run(
    kind: _Kind,
    x: mx.array,
    weight: mx.array,
    rest: tuple[mx.array, ...],
    shapes: Sequence[tuple[int, ...]],
    heads: tuple[tuple[str, int], ...] = (),
) -> list[mx.array]:
    rows, count = x.shape[0], weight.shape[0]
    warps = kind.warps_for(x.shape[-1])
    out: list[mx.array] = _kernel(kind, x.dtype, kind.shared_bytes(rows, warps))(
        inputs=[x, weight, *rest],
        output_shapes=list(shapes),
        output_dtypes=[x.dtype] * len(shapes),
        grid=(count // (16 * kind.tiles) * warps * 32, 1, 1),
        threadgroup=(warps * 32, 1, 1),
        template=[
            ("T", x.dtype),
            ("ROWS", rows),
            ("MT", kind.tiles),
            ("W", warps),
            ("DEPTH", kind.depth),
            *heads,
        ],
    )
    return out


def supported_here() -> bool:
    """True from sm_80 on, which brought the instructions that the kernels use."""
    return int(mx.device_info().get("compute_capability_major", 0)) >= 8


def fits(weight: Weight | mx.array) -> bool:
    """True if the kernels can take this weight."""
    weight = as_weight(weight)
    if not isinstance(weight, Dense) or weight.weight.dtype not in (mx.bfloat16, mx.float16):
        return False
    return weight.inputs % 32 == 0 and weight.outputs % 32 == 0 and weight.outputs <= MAX_WEIGHT_ROWS


def fits_heads(size: int) -> bool:
    """True if `qkv_rope` can take heads of this size: half of one must be whole tiles."""
    return size % 32 == 0


def prepare(weight: Weight | mx.array) -> Weight:
    return as_weight(weight)


def _dense(weight: Weight | mx.array) -> mx.array:
    weight = as_weight(weight)
    assert isinstance(weight, Dense), "`fits` was asked"
    return weight.weight


def _normed(x: mx.array, norm: Norm | None) -> mx.array:
    return x if norm is None else mx.fast.rms_norm(x, norm.weight, norm.eps)


def matmul(
    x: mx.array,
    weight: Weight | mx.array,
    *,
    bias: mx.array | None = None,
    norm: Norm | None = None,
    then: Weight | None = None,
) -> mx.array:
    """norm(x) @ weight.T + bias for x of (rows, 1, size)."""
    w = _dense(weight)
    kind = _WIDE_KIND if w.shape[0] >= WIDE_WEIGHT_ROWS else _NARROW_KIND
    out = _run(kind, _normed(x, norm), w, (), [(*x.shape[:-1], w.shape[0])])[0]
    return out if bias is None else out + bias


def matmul_add(
    x: mx.array,
    weight: Weight | mx.array,
    residual: mx.array,
    *,
    bias: mx.array | None = None,
    norm: Norm | None = None,
    factor: float = 1.0,
    then: Weight | None = None,
) -> mx.array:
    """residual + factor * (norm(x) @ weight.T + bias)"""
    w = _dense(weight)
    if bias is not None or factor != 1.0:
        return residual + factor * matmul(x, weight, bias=bias, norm=norm)
    return _run(_ADD_KIND, _normed(x, norm), w, (residual,), [(*x.shape[:-1], w.shape[0])])[0]


def glu(
    x: mx.array,
    weight: Weight | mx.array,
    *,
    activation: str = "silu",
    bias: mx.array | None = None,
    norm: Norm | None = None,
    then: Weight | None = None,
) -> mx.array:
    """activation(gate) * up, where the first half of the weight's rows gives the gate."""
    assert activation == "silu" and bias is None
    w = _dense(weight)
    return _run(_SWIGLU_KIND, _normed(x, norm), w, (), [(*x.shape[:-1], w.shape[0] // 2)])[0]


def qkv_rope(
    x: mx.array,
    weight: Weight | mx.array,
    offset: mx.array,
    periods: mx.array,
    heads: int,
    groups: int,
    size: int,
    *,
    norm: Norm | None = None,
    then: Weight | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """Queries, keys and values of (rows, heads or groups, 1, size); RoPE is applied to the first two."""
    rows = x.shape[0]
    shapes = [(rows, heads, 1, size), (rows, groups, 1, size), (rows, groups, 1, size)]
    counts = (("H", heads), ("KV", groups), ("D", size))
    queries, keys, values = _run(_ROPE_KIND, _normed(x, norm), _dense(weight), (offset, periods), shapes, counts)
    return queries, keys, values
