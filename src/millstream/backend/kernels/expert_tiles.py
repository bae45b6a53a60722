"""Expert layers of a mixture as CUDA kernels for many rows: the tokens of a prefill pass.

`sort_choices` lists the choices of all rows by expert. A block of a product then takes up to 128 of an expert's rows and
128 rows of its weight, through shared memory and tensor cores. Tiles of one expert are equally long, and stand beside
each other in the grid: the weight comes from memory once. A row's sum goes over its inputs in order, in one thread, so
it is the same wherever the row stands.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from millstream.backend.kernels import expert_matmul, ptx
from millstream.backend.kernels.compiled import cuda_kernel
from millstream.backend.kernels.expert_matmul import Activation, ExpertWeights, activation_source

ROWS = 128
"""Rows, and outputs, of a block; with a gate, half of the outputs are those of the other weight."""
STAGES, THREADS, SORT_THREADS = 3, 256, 1024
SHARED_BYTES = STAGES * 2 * ROWS * 128
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
  const int E = w0_shape[0], N = w0_shape[1], K = w0_shape[2];
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
      const int part = (int)blockIdx.x - (last - tiles);
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
  constexpr int OWN = GLU ? ROWS / 2 : ROWS, SIZE = 2 * ROWS * 128, HALF = ROWS * 128;
  extern __shared__ uint4 ring[];
  const unsigned shared = (unsigned)__cvta_generic_to_shared(ring);
  const int piece = tid % 8, line = tid / 8, n0 = blockIdx.y * OWN;
  const unsigned put = shared + line * 128 + ((piece ^ line % 8) << 4);
  unsigned xs[4], ws[4];
  #pragma unroll
  for (int j = 0; j < 4; j++) {
    const int r = line + j * 32, n = min(n0 + r % OWN, N - 1);
    xs[j] = r < rows ? (unsigned)(GLU ? listed[begin + r] / SLOTS : begin + r) * K + piece * 8 : 0;
    ws[j] = (unsigned)n * K + piece * 8;
  }
  const T* one = w0 + (size_t)expert * N * K;
  const T* two = OTHER(w1, w0) + (size_t)expert * N * K;
  const int steps = (K + 63) / 64;
  auto fetch = [&](int step) {
    if (step < steps) {
      const unsigned to = put + step % STAGES * SIZE, bytes = step * 64 + piece * 8 < K ? 16 : 0;
      const int k = bytes ? step * 64 : 0;  // what lies beyond a row becomes zeros
      #pragma unroll
      for (int j = 0; j < 4; j++) {
        if (line + j * 32 < rows) mill_copy(to + j * 4096, x + xs[j] + k, bytes);
        mill_copy(to + HALF + j * 4096, (j * 32 < OWN ? one : two) + ws[j] + k, bytes);
      }
    }
    mill_commit();
  };
  #pragma unroll
  for (int i = 0; i < STAGES - 1; i++) fetch(i);
  const int wm = warp / 4, wn = warp % 4, live = ((rows + 15) / 16 - wm + 1) / 2;
  const unsigned flip = lane % 8;
  const unsigned from_x = shared + (wm * 16 + lane % 16) * 128, high_x = lane / 16;
  const unsigned from_w = shared + HALF + ((GLU ? wn * 16 : wn * 32) + lane / 16 * 8 + lane % 8) * 128;
  const unsigned high_w = lane / 8 % 2, apart = (GLU ? ROWS / 2 : 16) * 128;
  float acc[4][4][4] = {};
  #pragma unroll 1
  for (int step = 0; step < steps; step++) {
    mill_wait<STAGES - 2>();
    __syncthreads();
    fetch(step + STAGES - 1);
    const unsigned stage = step % STAGES * SIZE;
    #pragma unroll
    for (int k = 0; k < 4; k++) {
      unsigned b[2][4], a[2][4];
      const unsigned at_x = from_x + stage + (((k * 2 + high_x) ^ flip) << 4);
      const unsigned at_w = from_w + stage + (((k * 2 + high_w) ^ flip) << 4);
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


def _source(activation: Activation | None, biased: bool) -> str:
    if activation is None:
        epilogue = _DOWN.replace("BIAS", _DOWN_BIAS if biased else "")
    else:
        epilogue = _GLU.replace("BIAS", _GLU_BIAS if biased else "")
        epilogue = epilogue.replace("ACTIVATION", activation_source(activation))
    other = "#define OTHER(one, two) one\n" if activation is not None else "#define OTHER(one, two) two\n"
    return other + _FIND + _PRODUCT.replace("EPILOGUE", epilogue)


@functools.cache
def _kernel(name: str, inputs: tuple[str, ...], activation: Activation | None, biased: bool, dtype: mx.Dtype) -> Any:
    return cuda_kernel(
        name=f"millstream_{name}",
        input_names=list(inputs),
        output_names=["out"],
        source=_source(activation, biased),
        header=ptx.COPIES + ptx.mma(dtype == mx.float16) + _HEADER,
        shared_memory=SHARED_BYTES,
    )


@functools.cache
def _sort_kernel() -> Any:
    return cuda_kernel(
        name="millstream_sort_choices", input_names=["indices"], output_names=["listed", "starts"], source=_SORT
    )


def fits(weights: ExpertWeights, dtype: mx.Dtype) -> bool:
    """True if the kernels can take these weights, for rows of this type."""
    small = weights.outputs * weights.inputs < LARGEST
    return weights.packing is None and expert_matmul.fits(weights, dtype) and small


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


def tiled_glu(
    x: mx.array, choices: Sorted, gate: ExpertWeights, up: ExpertWeights, activation: Activation
) -> mx.array:
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
        names.append(f"w{index}")
        arrays += weight.arrays
        if weight.bias is not None:
            names.append(f"c{index}")
            arrays.append(weight.bias)
    tiles = min(first.experts, entries) + entries // ROWS
    own = ROWS // len(weights)
    kernel = _kernel(name, tuple(names), activation, first.bias is not None, x.dtype)
    out: mx.array = kernel(
        inputs=arrays,
        output_shapes=[(entries, first.outputs)],
        output_dtypes=[x.dtype],
        grid=(tiles * THREADS, (first.outputs + own - 1) // own, 1),
        threadgroup=(THREADS, 1, 1),
        template=[
            ("T", x.dtype),
            ("GLU", activation is not None),
            ("SLOTS", choices.slots),
            ("ROWS", ROWS),
            ("STAGES", STAGES),
        ],
    )[0]
    return out
