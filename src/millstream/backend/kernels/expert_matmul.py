"""Expert layers of a mixture as CUDA kernels: a step's few rows through the experts that they chose.

A launch has a block per tile of weight rows for every expert that could have been chosen. A block reads all choices,
finds the n-th expert that somebody chose and its rows, or ends. With one row, or if nearly all experts are chosen, it
knows its expert at once, and weights are on their way while it looks for rows. It then works like `small_matmul`: its
warps split K, and weights stream through shared memory; the rows are gathered by their numbers. How a sum is split
depends on the weight alone, so a row gets the same numbers whatever else is in the batch.

Packed weights are unpacked in registers to what `mx.dequantize` would give.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx

from millstream.backend.kernels import ptx
from millstream.backend.kernels.compiled import cuda_kernel
from millstream.backend.kernels.unpack_cuda import MODES, unpack_source

MAX_ROWS = 512
"""Rows that a launch may have: each may choose an expert once, and blocks hold the list in shared memory."""
MAX_EXPERTS = 1024
CROWDED = 12
"""With more rows per expert than this, on average, a pass takes twice as many of them."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How weights are quantised: as `mx.quantize` names it."""

    bits: int
    group_size: int
    mode: str


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One projection of all experts: (experts, outputs, inputs), dense or packed, and a bias if there is one."""

    arrays: tuple[mx.array, ...]
    """The weight; with packing also scales, and with affine packing also biases of groups."""
    packing: Packing | None = None
    bias: mx.array | None = None

    @property
    def experts(self) -> int:
        return int(self.arrays[0].shape[0])

    @property
    def outputs(self) -> int:
        return int(self.arrays[0].shape[1])

    @property
    def inputs(self) -> int:
        words = int(self.arrays[0].shape[2])
        return words if self.packing is None else words * 32 // self.packing.bits


_HEADER = """
__device__ __forceinline__ void mill_fetch_some(void* to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
    :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "r"(bytes) : "memory");
}
"""

_DTYPES = (mx.bfloat16, mx.float16)

# A chunk is 64 bytes of each weight row: per thread SUB times eight numbers, 1 dense, 2 of 8 bits, 4 of 4 bits. Tile m
# of a block is rows r0 + m * 16; with a gate, the second half of the tiles are the same rows of the other weight.
_FIND = """
  constexpr int CH = 32 * SUB, PER = 8 * SUB, TH = W * 32, LINE = 16 * MT + 1, COLS = NT * 8;
  constexpr int OWN = GLU ? MT / 2 : MT;
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4;
  const int N = w0_shape[1], K = w0_shape[2] * NUMBERS, r0 = blockIdx.x * 16 * OWN;
  const int slots = indices_shape[1], entries = indices_shape[0] * slots, words = (w0_shape[0] + 31) / 32;
  __shared__ unsigned chosen[MAX_EXPERTS / 32];
  __shared__ unsigned short list[MAX_ROWS];
  __shared__ int listed;
  int expert = -1;
  if (indices_shape[0] == 1) {
    expert = indices[blockIdx.y];  // a row's experts are all different
  } else if (gridDim.y == w0_shape[0] && entries >= 4 * w0_shape[0]) {
    expert = blockIdx.y;  // nearly all are chosen: the weight is fetched before that is certain
  } else {
    for (int i = tid; i < words; i += TH) chosen[i] = 0;
    __syncthreads();
    for (int i = tid; i < entries; i += TH) {
      const unsigned each = indices[i];  // -1: none
      if (each < (unsigned)w0_shape[0]) atomicOr(&chosen[each / 32], 1u << (each % 32));
    }
    __syncthreads();
    int skip = blockIdx.y;
    for (int i = 0; i < words; i++) {
      unsigned bits = chosen[i];
      const int count = __popc(bits);
      if (skip < count) {
        for (; skip > 0; skip--) bits &= bits - 1;
        expert = i * 32 + __ffs(bits) - 1;
        break;
      }
      skip -= count;
    }
  }
  if (expert < 0) return;
"""

_MATMUL = """
  extern __shared__ uint4 ring[];
  const size_t line = (size_t)K * 64 / CH;  // bytes of a weight row
  const int chunks = (K + CH - 1) / CH, mine = (chunks - warp + W - 1) / W;
  const unsigned char* wp[MT];
  #pragma unroll
  for (int m = 0; m < MT; m++) {
    const unsigned char* base = reinterpret_cast<const unsigned char*>(m < OWN ? w0 : OTHER(w1, w0));
    wp[m] = base + ((size_t)expert * N + r0 + m % OWN * 16 + g) * line + t * 16;
  }
  // Each thread fetches what it uses itself; what lies beyond the row becomes zeros.
  auto fetch = [&](int i) {
    const int c = warp + i * W;
    if (i < mine) {
      const int bytes = c * CH + t * PER < K ? 16 : 0;
      #pragma unroll
      for (int m = 0; m < MT; m++) {
        uint4* to = ring + ((i % DEPTH * MT + m) * 2) * TH + tid;
        mill_fetch_some(to, wp[m] + (size_t)c * 64, bytes);
        mill_fetch_some(to + TH, wp[m] + 8 * line + (size_t)c * 64, bytes);
      }
    }
    mill_commit();
  };
  #pragma unroll
  for (int i = 0; i < DEPTH - 1; i++) fetch(i);
  // Which (row, slot) pairs chose this expert: found while the weights are on their way.
  if (warp == 0) {
    int count = 0;
    for (int i = lane; i - lane < entries; i += 32) {
      const bool hit = i < entries && indices[i] == expert;
      const unsigned hits = __ballot_sync(0xffffffffu, hit);
      if (hit) list[count + __popc(hits & ((1u << lane) - 1))] = i;
      count += __popc(hits);
    }
    if (lane == 0) listed = count;
  }
  __syncthreads();
  const int count = listed;
  if (count == 0) {
    mill_wait<0>();
    return;
  }
  SCALES
  for (int first = 0; first < count; first += COLS) {
    if (first > 0) {
      __syncthreads();
      #pragma unroll
      for (int i = 0; i < DEPTH - 1; i++) fetch(i);
    }
    const int tiles = min(NT, (count - first + 7) / 8);
    const T* xp[NT];
    #pragma unroll
    for (int n = 0; n < NT; n++) {
      const int at = first + n * 8 + g, entry = list[at < count ? at : 0];
      xp[n] = x + (size_t)(GLU ? entry / slots : entry) * K + t * PER;
    }
    float acc[MT][NT][4] = {};
    uint4 b[NT], next[NT];
    auto read = [&](int i, int s) {
      const int k = (warp + i * W) * CH;
      const bool in = i < mine && k + t * PER < K;
      #pragma unroll
      for (int n = 0; n < NT; n++) {
        next[n] = make_uint4(0, 0, 0, 0);
        if (in && n < tiles) next[n] = *reinterpret_cast<const uint4*>(xp[n] + k + s * 8);
      }
    };
    read(0, 0);
    FIRST_SCALES
    #pragma unroll 1
    for (int i = 0; i < mine; i++) {
      uint4 a[MT][2];
      mill_wait<DEPTH - 2>();
      #pragma unroll
      for (int m = 0; m < MT; m++) {
        const uint4* at = ring + ((i % DEPTH * MT + m) * 2) * TH + tid;
        a[m][0] = at[0];
        a[m][1] = at[TH];
      }
      fetch(i + DEPTH - 1);
      NEXT_SCALES
      #pragma unroll
      for (int s = 0; s < SUB; s++) {
        #pragma unroll
        for (int n = 0; n < NT; n++) b[n] = next[n];
        read(s + 1 < SUB ? i : i + 1, (s + 1) % SUB);
        unsigned p[MT][2][4];
        #pragma unroll
        for (int m = 0; m < MT; m++)
          #pragma unroll
          for (int h = 0; h < 2; h++) {
            UNPACK
          }
        #pragma unroll
        for (int n = 0; n < NT; n++) {
          if (n >= tiles) break;
          ORDER
          #pragma unroll
          for (int m = 0; m < MT; m++) {
            mill_mma(acc[m][n], p[m][0][0], p[m][1][0], p[m][0][1], p[m][1][1], row.x, row.y);
            mill_mma(acc[m][n], p[m][0][2], p[m][1][2], p[m][0][3], p[m][1][3], row.z, row.w);
          }
        }
      }
    }
    // The warps' sums: a line a column, one float more against bank conflicts. They lie where the weight lay.
    __syncthreads();
    float* sums = reinterpret_cast<float*>(ring);
    #pragma unroll
    for (int m = 0; m < MT; m++)
      #pragma unroll
      for (int n = 0; n < NT; n++)
        #pragma unroll
        for (int c = 0; c < 4; c++)
          sums[(warp * COLS + n * 8 + t * 2 + c % 2) * LINE + m * 16 + g + c / 2 * 8] = acc[m][n][c];
    __syncthreads();
    const int live = min(COLS, count - first);
    for (int i = tid; i < live * 16 * OWN; i += TH) {
      const int col = i / (16 * OWN), r = i % (16 * OWN), entry = list[first + col];
      auto sum = [&](int at) {
        float total = 0.f;
        #pragma unroll
        for (int v = 0; v < W; v++) total += sums[(v * COLS + col) * LINE + at];
        return float(T(total));  // rounded, as the product alone would be
      };
      EPILOGUE
      out[(size_t)entry * N + r0 + r] = T(result);
    }
  }
"""

_DENSE_PIECES = {
    "SCALES": "",
    "FIRST_SCALES": "",
    "NEXT_SCALES": "",
    "UNPACK": "for (int j = 0; j < 4; j++) p[m][h][j] = reinterpret_cast<const unsigned*>(&a[m][h])[j];",
    "ORDER": "const uint4 row = b[n];",
}
# A thread's numbers of a chunk are in one group, since PER <= G. What is read ahead is converted when it is needed.
_SCALES = """
  const int groups = K / G;
  RAW scale_next[MT][2], bias_next[MT][2] = {};
  unsigned scale[MT][2], bias[MT][2] = {};
  auto scales = [&](int i) {
    const int k = (warp + i * W) * CH + t * PER;
    const bool in = i < mine && k < K;
    #pragma unroll
    for (int m = 0; m < MT; m++)
      #pragma unroll
      for (int h = 0; h < 2; h++) {
        const size_t at = ((size_t)expert * N + r0 + m % OWN * 16 + h * 8 + g) * groups + k / G;
        scale_next[m][h] = in ? reinterpret_cast<const RAW*>(m < OWN ? s0 : OTHER(s1, s0))[at] : 0;
        READ_BIAS
      }
  };
"""
_READ_BIAS = "bias_next[m][h] = in ? reinterpret_cast<const RAW*>(m < OWN ? z0 : OTHER(z1, z0))[at] : 0;"
_NEXT_SCALES = """
      #pragma unroll
      for (int m = 0; m < MT; m++)
        #pragma unroll
        for (int h = 0; h < 2; h++) {
          scale[m][h] = mill_scale<MODE>(reinterpret_cast<const char*>(&scale_next[m][h]));
          if constexpr (MODE == 0) bias[m][h] = mill_scale<MODE>(reinterpret_cast<const char*>(&bias_next[m][h]));
        }
      scales(i + 1);
"""
_PACKED_PIECES = {
    "FIRST_SCALES": "scales(0);",
    "NEXT_SCALES": _NEXT_SCALES,
    "UNPACK": """mill_unpack<BITS, MODE>(
                reinterpret_cast<const char*>(&a[m][h]) + s * BITS, scale[m][h], bias[m][h], p[m][h]);""",
    "ORDER": "const uint4 row = mill_as_packed<BITS>(b[n]);",
}
_FORMATS = {("affine", 4): (32, 64, 128), ("affine", 8): (32, 64, 128), ("mxfp4", 4): (32,), ("mxfp8", 8): (32,)}
"""The packed formats that the kernels read, with their group sizes."""


def _pieces(packing: Packing | None) -> dict[str, str]:
    if packing is None:
        return _DENSE_PIECES
    affine = packing.mode == "affine"
    scales = _SCALES.replace("READ_BIAS", _READ_BIAS if affine else "")
    return {**_PACKED_PIECES, "SCALES": scales.replace("RAW", "unsigned short" if affine else "unsigned char")}


_ACTIVATIONS = {
    "silu": "const float result = float(T(gate / (1.f + __expf(-gate)))) * up;",
    "gelu_tanh": """
      const float inner = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
      const float result = float(T(0.5f * gate * (1.f + tanhf(inner)))) * up;""",
    "clipped": """
      const float low = fminf(gate, LIMIT), linear = fminf(fmaxf(up, -LIMIT), LIMIT);
      const float result = float(T(linear + 1.f)) * float(T(low / (1.f + __expf(-ALPHA * low))));""",
}
_GLU_EPILOGUE = """
      float gate = sum(r), up = sum(r + 16 * OWN);
      BIAS
      ACTIVATION
"""
_GLU_BIAS = """
      gate = float(T(gate + float(c0[(size_t)expert * N + r0 + r])));
      up = float(T(up + float(c1[(size_t)expert * N + r0 + r])));
"""
_DOWN_EPILOGUE = """
      float result = sum(r);
      BIAS
"""
_DOWN_BIAS = "result = float(T(result + float(c0[(size_t)expert * N + r0 + r])));"


@dataclass(frozen=True, slots=True)
class Activation:
    """What joins gate and up; `clipped` is gpt-oss's, with its two numbers."""

    kind: Literal["silu", "gelu_tanh", "clipped"]
    alpha: float = 1.702
    limit: float = 7.0


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tiles of 16 weight rows per block, warps that split K, chunks in flight, columns of eight rows per pass."""

    tiles: int
    warps: int
    depth: int
    columns: int = 2

    def shared_bytes(self) -> int:
        """For the ring buffer of the weight, which later holds the sums of the warps."""
        ring = self.depth * self.tiles * 2 * self.warps * 32 * 16
        return max(ring, self.warps * self.columns * 8 * (16 * self.tiles + 1) * 4)


GLU_TILING = Tiling(tiles=2, warps=4, depth=4)
DOWN_TILING = Tiling(tiles=2, warps=4, depth=4)


def activation_source(activation: Activation) -> str:
    """CUDA that makes `result` of `gate` and `up`."""
    text = _ACTIVATIONS[activation.kind]
    return text.replace("LIMIT", f"{activation.limit!r}f").replace("ALPHA", f"{activation.alpha!r}f")


def _source(packing: Packing | None, activation: Activation | None, biased: bool) -> str:
    pieces = _pieces(packing)
    if activation is None:
        epilogue = _DOWN_EPILOGUE.replace("BIAS", _DOWN_BIAS if biased else "")
    else:
        epilogue = _GLU_EPILOGUE.replace("BIAS", _GLU_BIAS if biased else "")
        epilogue = epilogue.replace("ACTIVATION", activation_source(activation))
    text = _MATMUL
    for name in ("NEXT_SCALES", "FIRST_SCALES", "SCALES", "UNPACK", "ORDER"):
        text = text.replace(name, pieces[name])
    text = text.replace("EPILOGUE", epilogue)
    other = "#define OTHER(one, two) one\n" if activation is not None else "#define OTHER(one, two) two\n"
    find = _FIND.replace("MAX_ROWS", str(MAX_ROWS)).replace("MAX_EXPERTS", str(MAX_EXPERTS))
    return other + find + text


@functools.cache
def _kernel(
    name: str,
    inputs: tuple[str, ...],
    packing: Packing | None,
    activation: Activation | None,
    biased: bool,
    dtype: mx.Dtype,
    shared: int,
) -> Any:
    header = ptx.COPIES + ptx.mma(dtype == mx.float16) + _HEADER + ("" if packing is None else unpack_source(dtype))
    return cuda_kernel(
        name=f"millstream_{name}",
        input_names=list(inputs),
        output_names=["out"],
        source=_source(packing, activation, biased),
        header=header,
        shared_memory=shared,
    )


def fits(weights: ExpertWeights, dtype: mx.Dtype) -> bool:
    """True if the kernels can take these weights, for rows of this type."""
    packing = weights.packing
    if dtype not in _DTYPES or weights.inputs % 32 or weights.outputs % 32 or weights.experts > MAX_EXPERTS:
        return False
    if weights.bias is not None and weights.bias.dtype != dtype:
        return False
    if packing is None:
        return weights.arrays[0].dtype == dtype
    if packing.group_size not in _FORMATS.get((packing.mode, packing.bits), ()):
        return False
    scale_type = dtype if packing.mode == "affine" else mx.uint8
    return all(array.dtype == scale_type for array in weights.arrays[1:])


def expert_glu(
    x: mx.array,
    indices: mx.array,
    gate: ExpertWeights,
    up: ExpertWeights,
    activation: Activation,
    tiling: Tiling = GLU_TILING,
) -> mx.array:
    """What each row's experts compute up to the activation: (rows x slots, size) from x of (rows, size). `indices` are
    the experts of each row, (rows, slots); what stands for -1 is undefined."""
    return _run("expert_glu", x, indices, (gate, up), activation, tiling)


def expert_down(h: mx.array, indices: mx.array, down: ExpertWeights, tiling: Tiling = DOWN_TILING) -> mx.array:
    """The last projection of each row's experts: from and to (rows x slots, size)."""
    return _run("expert_down", h, indices, (down,), None, tiling)


def _run(
    name: str,
    x: mx.array,
    indices: mx.array,
    weights: Sequence[ExpertWeights],
    activation: Activation | None,
    tiling: Tiling,
) -> mx.array:
    first = weights[0]
    packing, biased = first.packing, first.bias is not None
    rows, slots = indices.shape
    if rows * slots > CROWDED * first.experts:
        # How many rows a pass has changes no number.
        tiling = dataclasses.replace(tiling, columns=2 * tiling.columns)
    arrays = [x, indices]
    names = ["x", "indices"]
    for index, weight in enumerate(weights):
        names += [f"{letter}{index}" for letter in ("w", "s", "z")[: len(weight.arrays)]]
        arrays += weight.arrays
        if weight.bias is not None:
            names.append(f"c{index}")
            arrays.append(weight.bias)
    own = tiling.tiles // len(weights)
    kernel = _kernel(name, tuple(names), packing, activation, biased, x.dtype, tiling.shared_bytes())
    template: list[tuple[str, Any]] = [
        ("T", x.dtype),
        ("NUMBERS", 1 if packing is None else 32 // packing.bits),
        ("SUB", 1 if packing is None else 16 // packing.bits),
        ("GLU", activation is not None),
        ("MT", tiling.tiles),
        ("W", tiling.warps),
        ("DEPTH", tiling.depth),
        ("NT", tiling.columns),
    ]
    if packing is not None:
        template += [("BITS", packing.bits), ("G", packing.group_size), ("MODE", MODES[packing.mode])]
    out: mx.array = kernel(
        inputs=arrays,
        output_shapes=[(rows * slots, first.outputs)],
        output_dtypes=[x.dtype],
        grid=(first.outputs // (16 * own) * tiling.warps * 32, min(first.experts, rows * slots), 1),
        threadgroup=(tiling.warps * 32, 1, 1),
        template=template,
    )[0]
    return out
