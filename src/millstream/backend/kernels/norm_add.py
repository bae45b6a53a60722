"""An RMS norm and the residual after it, as one CUDA launch; and the norm that comes next, if its input is wanted."""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx

from millstream.backend.kernels.compiled import cuda_kernel
from millstream.backend.kernels.weights import Norm

THREADS = 256
MAX_SIZE = 8 * THREADS * 8
"""A thread keeps its part of a row in registers."""

# A block has a row. The numbers are rounded where MLX's own operations round them.
_SOURCE = """
  const int size = norm_shape[0], warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const size_t row = (size_t)blockIdx.x * size;
  __shared__ float parts[2][TH / 32];
  auto mean = [&](float sum, int turn) {
    #pragma unroll
    for (int o = 16; o; o /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, o);
    if (lane == 0) parts[turn][warp] = sum;
    __syncthreads();
    float all = 0.f;
    #pragma unroll
    for (int v = 0; v < TH / 32; v++) all += parts[turn][v];
    return all / size;
  };
  auto load = [&](const T* from, int at, float* to) {
    const uint4 words = *reinterpret_cast<const uint4*>(from + at);
    T numbers[8];
    memcpy(numbers, &words, 16);
    #pragma unroll
    for (int i = 0; i < 8; i++) to[i] = float(numbers[i]);
  };
  auto store = [&](T* to, int at, const float* from) {
    T numbers[8];
    #pragma unroll
    for (int i = 0; i < 8; i++) numbers[i] = T(from[i]);
    uint4 words;
    memcpy(&words, numbers, 16);
    *reinterpret_cast<uint4*>(to + at) = words;
  };
  float values[PIECES][8], square = 0.f;
  #pragma unroll
  for (int p = 0; p < PIECES; p++) {
    const int at = (p * TH + threadIdx.x) * 8;
    if (at < size) {
      load(x + row, at, values[p]);
      #pragma unroll
      for (int i = 0; i < 8; i++) square += values[p][i] * values[p][i];
    }
  }
  const float length = rsqrtf(mean(square, 0) + EPS);
  square = 0.f;
  #pragma unroll
  for (int p = 0; p < PIECES; p++) {
    const int at = (p * TH + threadIdx.x) * 8;
    if (at < size) {
      float weight[8], rest[8];
      load(norm, at, weight);
      load(r + row, at, rest);
      #pragma unroll
      for (int i = 0; i < 8; i++) {
        const float normed = float(T(float(T(values[p][i] * length)) * weight[i]));
        values[p][i] = float(T(normed + rest[i]));
        square += values[p][i] * values[p][i];
      }
      store(out + row, at, values[p]);
    }
  }
"""

_AFTER = """
  const float next = rsqrtf(mean(square, 1) + NEXT_EPS);
  #pragma unroll
  for (int p = 0; p < PIECES; p++) {
    const int at = (p * TH + threadIdx.x) * 8;
    if (at < size) {
      float weight[8];
      load(after, at, weight);
      #pragma unroll
      for (int i = 0; i < 8; i++) values[p][i] = float(T(values[p][i] * next)) * weight[i];
      store(normed + row, at, values[p]);
    }
  }
"""


@functools.cache
def _kernel(eps: float, next_eps: float | None) -> Any:
    constants = f"#define EPS {eps!r}f\n" + (f"#define NEXT_EPS {next_eps!r}f\n" if next_eps is not None else "")
    return cuda_kernel(
        name="millstream_norm_add",
        input_names=["x", "norm", "r", *(["after"] if next_eps is not None else [])],
        output_names=["out", *(["normed"] if next_eps is not None else [])],
        source=constants + _SOURCE + (_AFTER if next_eps is not None else ""),
    )


def fits(x: mx.array) -> bool:
    """True if the kernel can take rows of this kind."""
    return x.dtype in (mx.bfloat16, mx.float16) and x.shape[-1] % 8 == 0 and x.shape[-1] <= MAX_SIZE


def norm_add(
    x: mx.array, norm: Norm, residual: mx.array, *, after: Norm | None = None
) -> mx.array | tuple[mx.array, mx.array]:
    """residual + norm(x); with `after` also that sum, normed again."""
    size = x.shape[-1]
    made = _kernel(norm.eps, None if after is None else after.eps)(
        inputs=[x, norm.weight, residual, *([] if after is None else [after.weight])],
        output_shapes=[x.shape] * (1 if after is None else 2),
        output_dtypes=[x.dtype] * (1 if after is None else 2),
        grid=(x.size // size * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        template=[("T", x.dtype), ("TH", THREADS), ("PIECES", -(-size // (8 * THREADS)))],
    )
    return made[0] if after is None else (made[0], made[1])
