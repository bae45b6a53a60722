"""The sampler as one CUDA kernel: the rules of `generation.sampling.sampler` in one launch instead of twenty.

One block per row. The thresholds of top-k and top-p are found by bisection over the row, which stays in the GPU's
cache: nothing is sorted. Rows at temperature 0 take their best token in the same launch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from millstream.backend.kernels.compiled import cuda_kernel
from millstream.types import Sampling

THREADS = 1024
DEEPEST = 40.0
"""Tokens below exp(-40) of the best token's weight are never drawn."""

HEADER = """
__device__ __forceinline__ float block_sum(float value, float* shared) {
  for (int o = 16; o > 0; o >>= 1) value += __shfl_xor_sync(0xffffffff, value, o);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  float all = shared[threadIdx.x % 32];
  for (int o = 16; o > 0; o >>= 1) all += __shfl_xor_sync(0xffffffff, all, o);
  return all;
}
"""

# `row[i]` is read again in each pass; weight(i) = exp((row[i] - best) / temperature), at most 1.
_SOURCE = """
  __shared__ float shared[32];
  __shared__ float best_value[32];
  __shared__ int best_place[32];
  __shared__ float starts[1024];
  const int line = blockIdx.x, me = threadIdx.x, count = logits_shape[1];
  const T* row = logits + (size_t)line * count;
  const float temperature = settings[line * 4], top_p = settings[line * 4 + 1];
  const float min_p = settings[line * 4 + 2], top_k = settings[line * 4 + 3];
  float best = -INFINITY;
  int place = count;
  for (int i = me; i < count; i += 1024) {
    const float x = float(row[i]);
    if (x > best) { best = x; place = i; }
  }
  for (int o = 16; o > 0; o >>= 1) {
    const float x = __shfl_xor_sync(0xffffffff, best, o);
    const int p = __shfl_xor_sync(0xffffffff, place, o);
    if (x > best || (x == best && p < place)) { best = x; place = p; }
  }
  if (me % 32 == 0) { best_value[me / 32] = best; best_place[me / 32] = place; }
  __syncthreads();
  best = best_value[me % 32];
  place = best_place[me % 32];
  for (int o = 16; o > 0; o >>= 1) {
    const float x = __shfl_xor_sync(0xffffffff, best, o);
    const int p = __shfl_xor_sync(0xffffffff, place, o);
    if (x > best || (x == best && p < place)) { best = x; place = p; }
  }
  if (temperature <= 0.f) {
    if (me == 0) out[line] = place;
    return;
  }
  const float scale = 1.f / temperature;
  float floor_ = -DEEPEST;
  if (min_p > 0.f) floor_ = fmaxf(floor_, __logf(min_p));
  float cut = floor_, from = -DEEPEST;
  if (top_k > 0.f) {
    float low = -DEEPEST, high = 0.f;
    for (int step = 0; step < 26; step++) {
      const float middle = 0.5f * (low + high);
      float n = 0.f;
      for (int i = me; i < count; i += 1024) n += (float(row[i]) - best) * scale >= middle ? 1.f : 0.f;
      if (block_sum(n, shared) >= top_k) low = middle; else high = middle;
    }
    cut = fmaxf(cut, low);
    from = low;  // the mass of top-p is that of the top k: min-p cuts beside it, not before
  }
  if (top_p < 1.f) {
    float all = 0.f;
    for (int i = me; i < count; i += 1024) {
      const float y = (float(row[i]) - best) * scale;
      if (y >= from) all += __expf(y);
    }
    const float target = top_p * block_sum(all, shared);
    float low = -DEEPEST, high = 0.f;
    for (int step = 0; step < 26; step++) {
      const float middle = 0.5f * (low + high);
      float mass = 0.f;
      for (int i = me; i < count; i += 1024) {
        const float y = (float(row[i]) - best) * scale;
        if (y >= middle && y >= from) mass += __expf(y);
      }
      if (block_sum(mass, shared) >= target) low = middle; else high = middle;
    }
    cut = fmaxf(cut, low);
  }
  const int share = (count + 1023) / 1024, first = me * share, beyond = min(count, first + share);
  float mine = 0.f;
  for (int i = first; i < beyond; i++) {
    const float y = (float(row[i]) - best) * scale;
    if (y >= cut) mine += __expf(y);
  }
  starts[me] = mine;
  __syncthreads();
  for (int o = 1; o < 1024; o <<= 1) {
    const float add = me >= o ? starts[me - o] : 0.f;
    __syncthreads();
    starts[me] += add;
    __syncthreads();
  }
  const float target = uniform[line] * starts[1023];
  const float before = starts[me] - mine;
  if (me == 0) out[line] = place;  // if rounding leaves nobody, the best token stands
  __syncthreads();
  if (mine > 0.f && target >= before && target < starts[me]) {
    float sum = before;
    int chosen = -1;
    for (int i = first; i < beyond; i++) {
      const float y = (float(row[i]) - best) * scale;
      if (y >= cut) {
        sum += __expf(y);
        chosen = i;
        if (sum > target) break;
      }
    }
    out[line] = chosen;
  }
"""


def source() -> str:
    """The body of the kernel. A test compiles it for the CPU and compares it with the reference sampler."""
    return _SOURCE.replace("DEEPEST", f"{DEEPEST}f")


@functools.cache
def _kernel() -> Any:
    return cuda_kernel(
        name="millstream_sample",
        input_names=["logits", "settings", "uniform"],
        output_names=["out"],
        source=source(),
        header=HEADER,
    )


def settings_of(rows: Sequence[Sampling]) -> mx.array:
    """The settings of each row, in the order that the kernel reads them."""
    return mx.array([[row.temperature, row.top_p, row.min_p, float(row.top_k)] for row in rows], dtype=mx.float32)


def sample(logits: mx.array, settings: mx.array, uniform: mx.array) -> mx.array:
    """One token per row. `settings` come from `settings_of`; `uniform` is a number in [0, 1) per row."""
    rows = logits.shape[0]
    (out,) = _kernel()(
        inputs=[logits, settings, uniform],
        output_shapes=[(rows,)],
        output_dtypes=[mx.int32],
        grid=(rows * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        template=[("T", logits.dtype)],
    )
    result: mx.array = out
    return result
