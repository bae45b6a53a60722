"""Expert layers of a mixture as CUDA kernels for many rows: the tokens of a prefill pass.

`sort_choices` lists the choices of all rows by expert. A block of a product then takes up to 128 of an expert's rows
and 128 rows of its weight, through shared memory and tensor cores. Tiles of one expert are equally long. All blocks of
some rows run at about the same time, and those of one expert do: what they share comes from memory once. A row's sum
goes over its inputs in order, in one thread, so it is the same wherever the row stands.

Packed weights arrive packed. Each thread unpacks what it fetched itself, to what `mx.dequantize` would give, into a
second tile in shared memory, a step ahead of the tensor cores.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from millstream.backend.kernels import expert_matmul, ptx
from millstream.backend.kernels.compiled import cuda_kernel
from millstream.backend.kernels.expert_matmul import Activation, ExpertWeights, Packing, activation_source
from millstream.backend.kernels.matmul_tilings import shared_limit
from millstream.backend.kernels.unpack_cuda import MODES, unpack_source

ROWS = 128
"""Rows, and outputs, of a block; with a gate, half of the outputs are those of the other weight."""
STAGES, THREADS, SORT_THREADS = 3, 256, 1024
TILE_BYTES = ROWS * 128
LARGEST = 2**32
"""Numbers of an operand must be fewer: threads keep where they read as 32 bits."""


@dataclass(frozen=True, slots=True)
class Sorted:
    """The choices of all rows by expert; those of one expert in the order of their rows."""

    order: mx.array
    """int32: which choice, row x slots + slot, stands where. Choices of -1 are left out, and the rest is undefined."""
    starts: mx.array
    """(experts + 1), int32: where each expert's choices begin."""
    slots: int


# A block lists one expert's choices: they begin after as many as there are choices of experts before it.
_SORT = """
  constexpr int WARPS = THREADS / 32;
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  const unsigned expert = blockIdx.x;
  const int entries = indices_shape[0] * indices_shape[1], span = (entries + THREADS - 1) / THREADS * 32;
  const int from = warp * span, to = min(entries, from + span);
  __shared__ int lower[WARPS], equal[WARPS];
  int less = 0, same = 0;
  #pragma unroll 4
  for (int i = from + lane; i < to; i += 32) {
    const unsigned each = indices[i];  // -1, for none, is larger than all
    less += each < expert;
    same += each == expert;
  }
  for (int o = 16; o > 0; o /= 2) {
    less += __shfl_xor_sync(0xffffffffu, less, o);
    same += __shfl_xor_sync(0xffffffffu, same, o);
  }
  if (lane == 0) { lower[warp] = less; equal[warp] = same; }
  __syncthreads();
  int start = 0, count = 0, at = 0;
  for (int w = 0; w < WARPS; w++) {
    start += lower[w];
    at += w < warp ? equal[w] : 0;
    count += equal[w];
  }
  if (tid == 0) {
    starts[expert] = start;
    if (expert == gridDim.x - 1) starts[expert + 1] = start + count;
  }
  at += start;
  for (int i = from + lane; i - lane < to; i += 32) {
    const bool hit = i < to && (unsigned)indices[i] == expert;
    const unsigned hits = __ballot_sync(0xffffffffu, hit);
    if (hit) listed[at + __popc(hits & ((1u << lane) - 1))] = i;
    at += __popc(hits);
  }
"""

_HEADER = """
__device__ __forceinline__ void mill_copy(unsigned to, const void* from, unsigned bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mill_read(unsigned* b, unsigned from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
    : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(from) : "memory");
}
"""

# Which expert and which of its rows are this block's: every expert has as many blocks as it needs, in order.
_FIND = """
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4;
  const int E = w0_shape[0], N = w0_shape[1], K = w0_shape[2] * NUMBERS;
  __shared__ int place[3];
  if (warp == 0) {
    int before = 0;
    if (lane == 0) place[0] = -1;
    __syncwarp();
    for (int base = 0; base < E; base += 32) {
      const int e = base + lane, from = e < E ? starts[e] : 0, count = e < E ? starts[e + 1] - from : 0;
      const int tiles = (count + ROWS - 1) / ROWS;
      int last = tiles;
      for (int o = 1; o < 32; o *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, last, o);
        last += lane >= o ? other : 0;
      }
      last += before;
      const int part = (int)blockIdx.y - (last - tiles);
      const bool mine = part >= 0 && part < tiles;
      if (mine) {
        const int each = ((count + tiles - 1) / tiles + 15) / 16 * 16;
        place[0] = e;
        place[1] = from + part * each;
        place[2] = min(each, count - part * each);
      }
      if (__ballot_sync(0xffffffffu, mine)) break;
      before = __shfl_sync(0xffffffffu, last, 31);
    }
  }
  __syncthreads();
  const int expert = place[0], begin = place[1], rows = place[2];
  if (expert < 0) return;
"""

# A stage is 64 numbers of each row: 128 bytes, in pieces of 16 that are permuted by the row against bank conflicts.
# Warps are two by four: every other 16 rows, and 32 outputs. With a gate, 16 outputs of each weight.
_PRODUCT = """
  constexpr int OWN = GLU ? ROWS / 2 : ROWS, TILE = ROWS * 128;
  extern __shared__ uint4 ring[];
  const unsigned shared = (unsigned)__cvta_generic_to_shared(ring);
  const int piece = tid % 8, line = tid / 8, n0 = blockIdx.x * OWN;
  const unsigned put = shared + line * 128 + ((piece ^ line % 8) << 4);
  unsigned xs[4];
  #pragma unroll
  for (int j = 0; j < 4; j++) {
    const int r = line + j * 32;
    xs[j] = r < rows ? (unsigned)(GLU ? listed[begin + r] / SLOTS : begin + r) * K + piece * 8 : 0;
  }
  const int steps = (K + 63) / 64;
  WEIGHT
  auto fetch = [&](int step) {
    if (step < steps) {
      const unsigned bytes = step * 64 + piece * 8 < K ? 16 : 0;
      const int k = bytes ? step * 64 : 0;  // what lies beyond a row becomes zeros
      #pragma unroll
      for (int j = 0; j < 4; j++)
        if (line + j * 32 < rows) mill_copy(put + step % STAGES * TILE + j * 4096, x + xs[j] + k, bytes);
      FETCH
    }
    mill_commit();
  };
  #pragma unroll
  for (int i = 0; i < STAGES - 1; i++) fetch(i);
  BEFORE
  const int wm = warp / 4, wn = warp % 4, live = ((rows + 15) / 16 - wm + 1) / 2;
  const unsigned flip = lane % 8;
  const unsigned from_x = shared + (wm * 16 + lane % 16) * 128, high_x = lane / 16;
  const unsigned from_w = shared + STAGES * TILE + ((GLU ? wn * 16 : wn * 32) + lane / 16 * 8 + lane % 8) * 128;
  const unsigned high_w = lane / 8 % 2, apart = (GLU ? ROWS / 2 : 16) * 128;
  float acc[4][4][4] = {};
  #pragma unroll 1
  for (int step = 0; step < steps; step++) {
    mill_wait<STAGES - 2>();
    UNPACK
    __syncthreads();
    fetch(step + STAGES - 1);
    const unsigned stage_x = from_x + step % STAGES * TILE, stage_w = from_w + step % DENSE_TILES * TILE;
    #pragma unroll
    for (int k = 0; k < 4; k++) {
      unsigned b[2][4], a[2][4];
      const unsigned at_x = stage_x + (((k * 2 + high_x) ^ flip) << 4);
      const unsigned at_w = stage_w + (((k * 2 + high_w) ^ flip) << 4);
      mill_read(b[0], at_w);
      mill_read(b[1], at_w + apart);
      mill_read(a[0], at_x);
      #pragma unroll
      for (int m = 0; m < 4; m++) {
        if (m >= live) break;
        if (m < 3) mill_read(a[(m + 1) % 2], at_x + (m + 1) * 4096);
        #pragma unroll
        for (int q = 0; q < 4; q++) {
          const unsigned* u = a[m % 2];
          mill_mma(acc[m][q], u[0], u[1], u[2], u[3], b[q / 2][q % 2 * 2], b[q / 2][q % 2 * 2 + 1]);
        }
      }
    }
  }
  const size_t biases = (size_t)expert * N;
  EPILOGUE
"""
_DENSE_PIECES = {
    "WEIGHT": """
  unsigned ws[4];
  #pragma unroll
  for (int j = 0; j < 4; j++) ws[j] = (unsigned)min(n0 + (line + j * 32) % OWN, N - 1) * K + piece * 8;
  const T* one = w0 + (size_t)expert * N * K;
  const T* two = OTHER(w1, w0) + (size_t)expert * N * K;
""",
    "FETCH": """
      #pragma unroll
      for (int j = 0; j < 4; j++) {
        const unsigned to = put + (STAGES + step % STAGES) * TILE + j * 4096;
        mill_copy(to, (j * 32 < OWN ? one : two) + ws[j] + k, bytes);
      }
""",
    "BEFORE": "",
    "UNPACK": "",
}
# A thread has half a row of a stage: 32 numbers, which are in one group, in 4 * BITS bytes.
_PACKED_PIECES = {
    "WEIGHT": """
  constexpr int PIECES = BITS / 4;
  const int row = tid / 2, side = tid % 2, n = min(n0 + row % OWN, N - 1), groups = K / G;
  const size_t at_weight = (size_t)expert * N + n;
  const bool first_weight = row < OWN;
  const char* packed = reinterpret_cast<const char*>(first_weight ? w0 : OTHER(w1, w0)) + at_weight * K / 8 * BITS;
  const RAW* scales = reinterpret_cast<const RAW*>(first_weight ? s0 : OTHER(s1, s0)) + at_weight * groups;
  ZEROS
  const unsigned slot = (STAGES + 2) * TILE + tid * 16;
  RAW scale_next = 0, zero_next = 0;
  auto scale_of = [&](int step) {
    const int k = step * 64 + side * 32;
    if (k >= K) return;  // zeros of the rows make the product zero, whatever the weight
    scale_next = scales[k / G];
    READ_ZERO
  };
""",
    "FETCH": """
      const unsigned there = step * 64 + side * 32 < K ? 16 : 0;
      #pragma unroll
      for (int p = 0; p < PIECES; p++)
        mill_copy(
            shared + slot + (step % STAGES * PIECES + p) * 4096,
            packed + (there ? step * 8 * BITS + side * 4 * BITS + p * 16 : 0), there);
""",
    "BEFORE": "scale_of(0);",
    "UNPACK": """
    {
      const unsigned scale = mill_scale<MODE>(reinterpret_cast<const char*>(&scale_next));
      const unsigned bias = MODE == 0 ? mill_scale<MODE>(reinterpret_cast<const char*>(&zero_next)) : 0u;
      scale_of(step + 1);
      uint4 raw[PIECES];
      char* base = reinterpret_cast<char*>(ring);
      #pragma unroll
      for (int p = 0; p < PIECES; p++)
        raw[p] = *reinterpret_cast<const uint4*>(base + slot + (step % STAGES * PIECES + p) * 4096);
      char* to = base + (STAGES + step % 2) * TILE + row * 128;
      #pragma unroll
      for (int i = 0; i < 4; i++) {
        unsigned pairs[4];
        mill_unpack<BITS, MODE>(reinterpret_cast<const char*>(raw) + i * BITS, scale, bias, pairs);
        *reinterpret_cast<uint4*>(to + ((side * 4 + i ^ row % 8) << 4)) = mill_in_order<BITS>(pairs);
      }
    }
""",
}
_IN_ORDER = """
template <int BITS> __device__ __forceinline__ uint4 mill_in_order(const unsigned* pairs) {
  if constexpr (BITS != 4) return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  return make_uint4(
      __byte_perm(pairs[0], pairs[1], 0x5410), __byte_perm(pairs[2], pairs[3], 0x5410),
      __byte_perm(pairs[0], pairs[1], 0x7632), __byte_perm(pairs[2], pairs[3], 0x7632));
}
"""
_GLU = """
  auto opened = [&](float gate, float up, int n) {
    gate = float(T(gate));  // rounded, as the product alone would be
    up = float(T(up));
    BIAS
    ACTIVATION
    return T(result);
  };
  #pragma unroll
  for (int m = 0; m < 4; m++)
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      const int r = (m * 2 + wm) * 16 + h * 8 + g;
      if (r >= rows) continue;
      #pragma unroll
      for (int q = 0; q < 2; q++) {
        const int n = n0 + wn * 16 + q * 8 + t * 2;
        if (n >= N) continue;
        T* to = out + (size_t)(begin + r) * N + n;
        to[0] = opened(acc[m][q][h * 2], acc[m][q + 2][h * 2], n);
        to[1] = opened(acc[m][q][h * 2 + 1], acc[m][q + 2][h * 2 + 1], n + 1);
      }
    }
"""
_GLU_BIAS = """
    gate = float(T(gate + float(c0[biases + n])));
    up = float(T(up + float(c1[biases + n])));
"""
_DOWN = """
  #pragma unroll
  for (int m = 0; m < 4; m++)
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      const int r = (m * 2 + wm) * 16 + h * 8 + g;
      if (r >= rows) continue;
      const size_t entry = listed[begin + r];
      #pragma unroll
      for (int q = 0; q < 4; q++) {
        const int n = n0 + wn * 32 + q * 8 + t * 2;
        if (n >= N) continue;
        #pragma unroll
        for (int c = 0; c < 2; c++) {
          float result = float(T(acc[m][q][h * 2 + c]));
          BIAS
          out[entry * N + n + c] = T(result);
        }
      }
    }
"""
_DOWN_BIAS = "result = float(T(result + float(c0[biases + n + c])));"


def _pieces(packing: Packing | None) -> dict[str, str]:
    if packing is None:
        return _DENSE_PIECES
    affine = packing.mode == "affine"
    zeros = "const RAW* zeros = reinterpret_cast<const RAW*>(first_weight ? z0 : OTHER(z1, z0)) + at_weight * groups;"
    weight = _PACKED_PIECES["WEIGHT"].replace("ZEROS", zeros if affine else "")
    weight = weight.replace("READ_ZERO", "zero_next = zeros[k / G];" if affine else "")
    return {**_PACKED_PIECES, "WEIGHT": weight.replace("RAW", "unsigned short" if affine else "unsigned char")}


def _source(packing: Packing | None, activation: Activation | None, biased: bool) -> str:
    if activation is None:
        epilogue = _DOWN.replace("BIAS", _DOWN_BIAS if biased else "")
    else:
        epilogue = _GLU.replace("BIAS", _GLU_BIAS if biased else "")
        epilogue = epilogue.replace("ACTIVATION", activation_source(activation))
    text = _PRODUCT
    for name, piece in _pieces(packing).items():
        text = text.replace(name, piece)
    other = "#define OTHER(one, two) one\n" if activation is not None else "#define OTHER(one, two) two\n"
    return other + _FIND + text.replace("EPILOGUE", epilogue)


def shared_bytes(packing: Packing | None) -> int:
    """Tiles of rows; tiles of a dense weight, or two that are unpacked and the packed ones."""
    weight = STAGES * TILE_BYTES if packing is None else 2 * TILE_BYTES + STAGES * THREADS * 4 * packing.bits
    return STAGES * TILE_BYTES + weight


@functools.cache
def _kernel(
    name: str,
    inputs: tuple[str, ...],
    packing: Packing | None,
    activation: Activation | None,
    biased: bool,
    dtype: mx.Dtype,
) -> Any:
    header = ptx.COPIES + ptx.mma(dtype == mx.float16) + _HEADER
    return cuda_kernel(
        name=f"millstream_{name}",
        input_names=list(inputs),
        output_names=["out"],
        source=_source(packing, activation, biased),
        header=header if packing is None else header + unpack_source(dtype) + _IN_ORDER,
        shared_memory=shared_bytes(packing),
    )


@functools.cache
def _sort_kernel() -> Any:
    return cuda_kernel(
        name="millstream_sort_choices", input_names=["indices"], output_names=["listed", "starts"], source=_SORT
    )


def fits(weights: ExpertWeights, dtype: mx.Dtype) -> bool:
    """True if the kernels can take these weights, for rows of this type."""
    if weights.outputs * weights.inputs >= LARGEST or shared_bytes(weights.packing) > shared_limit():
        return False
    return expert_matmul.fits(weights, dtype)


def sort_choices(indices: mx.array, experts: int) -> Sorted:
    """List what `indices` chooses, (rows, slots), by expert."""
    order, starts = _sort_kernel()(
        inputs=[indices],
        output_shapes=[(indices.size,), (experts + 1,)],
        output_dtypes=[mx.int32, mx.int32],
        grid=(experts * SORT_THREADS, 1, 1),
        threadgroup=(SORT_THREADS, 1, 1),
        template=[("THREADS", SORT_THREADS)],
    )
    return Sorted(order, starts, indices.shape[1])


def tiled_glu(x: mx.array, choices: Sorted, gate: ExpertWeights, up: ExpertWeights, activation: Activation) -> mx.array:
    """What the experts compute up to the activation: (rows x slots, size), sorted like the choices, from x of (rows,
    size)."""
    return _run("tiled_glu", x, choices, (gate, up), activation)


def tiled_down(h: mx.array, choices: Sorted, down: ExpertWeights) -> mx.array:
    """The last projection: from sorted rows, to (rows x slots, size) in the order of rows. What stands for -1 is
    undefined."""
    return _run("tiled_down", h, choices, (down,), None)


def _run(
    name: str, x: mx.array, choices: Sorted, weights: Sequence[ExpertWeights], activation: Activation | None
) -> mx.array:
    first, entries = weights[0], choices.order.size
    if x.size >= LARGEST:
        raise ValueError(f"{x.shape} is more than the kernels can count")
    names, arrays = ["x", "listed", "starts"], [x, choices.order, choices.starts]
    for index, weight in enumerate(weights):
        names += [f"{letter}{index}" for letter in ("w", "s", "z")[: len(weight.arrays)]]
        arrays += weight.arrays
        if weight.bias is not None:
            names.append(f"c{index}")
            arrays.append(weight.bias)
    tiles = min(first.experts, entries) + entries // ROWS
    own = ROWS // len(weights)
    packing = first.packing
    kernel = _kernel(name, tuple(names), packing, activation, first.bias is not None, x.dtype)
    template: list[tuple[str, Any]] = [
        ("T", x.dtype),
        ("GLU", activation is not None),
        ("SLOTS", choices.slots),
        ("ROWS", ROWS),
        ("STAGES", STAGES),
        ("NUMBERS", 1 if packing is None else 32 // packing.bits),
        ("DENSE_TILES", STAGES if packing is None else 2),
    ]
    if packing is not None:
        template += [("BITS", packing.bits), ("G", packing.group_size), ("MODE", MODES[packing.mode])]
    out: mx.array = kernel(
        inputs=arrays,
        output_shapes=[(entries, first.outputs)],
        output_dtypes=[x.dtype],
        grid=((first.outputs + own - 1) // own * THREADS, tiles, 1),
        threadgroup=(THREADS, 1, 1),
        template=template,
    )[0]
    return out
