"""The sampler as one CUDA kernel: the rules of `generation.sampling.sampler` in one launch instead of thirty.

One block per row. Rows at temperature 0 take their best token, the others draw by a number that is computed here,
from seed and position as MLX does it. The thresholds of top-k and top-p are found by bisection, in a short list of the
likeliest tokens if they decide, else over the row: nothing is sorted. A row's numbers depend on nothing but the row.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from millstream.backend.kernels.compiled import cuda_kernel
from millstream.backend.kernels.outbox import Letter
from millstream.types import Sampling

THREADS = 1024
DEEPEST = 40.0
"""Tokens below exp(-40) of the best token's weight are never drawn."""
LISTED = 2048
"""The most tokens in the list: two per thread."""

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

// The sum of all threads up to and including this one. `starts` has a number per thread, and all sums afterwards.
__device__ __forceinline__ float block_scan(float value, float* starts) {
  const int me = threadIdx.x;
  __syncthreads();
  starts[me] = value;
  __syncthreads();
  for (int o = 1; o < 1024; o <<= 1) {
    const float add = me >= o ? starts[me - o] : 0.f;
    __syncthreads();
    starts[me] += add;
    __syncthreads();
  }
  return starts[me];
}

template <typename T> struct alignas(16) Pack { T v[16 / sizeof(T)]; };

// Calls f(place, value) for all from `first` to `beyond`, in steps of `stride`; in order for each thread. AHEAD packs
// are read at once: the first pass, the only one for a best token, would take ten times as long if it waited for each.
// The others have no registers left for it: a block has 1,024 threads.
template <int AHEAD = 1, typename T, typename F>
__device__ __forceinline__ void over(const T* row, int first, int beyond, int stride, bool packed, F f) {
  constexpr int N = 16 / sizeof(T);
  if (packed) {
    int i = first;
    for (; AHEAD > 1 && i + (AHEAD - 1) * stride < beyond; i += AHEAD * stride) {
      Pack<T> packs[AHEAD];
#pragma unroll
      for (int p = 0; p < AHEAD; p++) packs[p] = *reinterpret_cast<const Pack<T>*>(row + i + p * stride);
#pragma unroll
      for (int p = 0; p < AHEAD; p++)
#pragma unroll
        for (int j = 0; j < N; j++) f(i + p * stride + j, float(packs[p].v[j]));
    }
    for (; i < beyond; i += stride) {
      const Pack<T> pack = *reinterpret_cast<const Pack<T>*>(row + i);
#pragma unroll
      for (int j = 0; j < N; j++) f(i + j, float(pack.v[j]));
    }
  } else {
    for (int i = first; i < beyond; i += stride) f(i, float(row[i]));
  }
}

// Threefry with 20 rounds, as mx.random.uniform computes the one number of a key.
__device__ __forceinline__ float uniform_of(unsigned seed, unsigned position) {
  const unsigned keys[3] = {seed, position, seed ^ position ^ 0x1BD11BDAu};
  const int turns[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  unsigned x = keys[0], y = keys[1];
#pragma unroll
  for (int i = 0; i < 5; i++) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int turn = turns[i % 2][j];
      x += y;
      y = ((y << turn) | (y >> (32 - turn))) ^ x;
    }
    x += keys[(i + 1) % 3];
    y += keys[(i + 2) % 3] + i + 1;
  }
  return fminf(float(x) * 2.3283064365386963e-10f, 0.99999994f);
}
"""

# y(x) = (x - best) / temperature, at most 0; a token's weight is exp(y). `row` is read again in each pass.
_SOURCE = """
  __shared__ float shared[32];
  __shared__ float best_value[32];
  __shared__ int best_place[32];
  __shared__ float starts[1024];
  __shared__ float list_y[LISTED];
  __shared__ int list_place[LISTED];
  constexpr int N = 16 / sizeof(T);
  const int line = blockIdx.x, me = threadIdx.x, count = logits_shape[1];
  const T* row = logits + (size_t)line * count;
  const bool packed = count % N == 0 && (size_t)row % 16 == 0;
  const int pack = packed ? N : 1, begin = me * pack, stride = 1024 * pack;
  const float temperature = settings[line * 4], top_p = settings[line * 4 + 1];
  const float min_p = settings[line * 4 + 2], top_k = settings[line * 4 + 3];
  if (me == 0) next_positions[line] = positions[line] + 1;
  auto tell = [&](int token) {
    out[line] = token;
#if TOLD
    reinterpret_cast<int*>(told[0])[line] = token;
#endif
  };
  float best = -INFINITY;
  int place = count;
  over<4>(row, begin, count, stride, packed, [&](int i, float x) {
    if (x > best) { best = x; place = i; }
  });
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
  if (place >= count) place = 0;  // no number in the row is above minus infinity
  if (temperature <= 0.f) {
    if (me == 0) tell(place);
    return;
  }
  const float scale = 1.f / temperature;
  float cut = -DEEPEST;
  if (min_p > 0.f) cut = fmaxf(cut, __logf(min_p));
  // Each thread has a share of neighbours, so that sums over threads are sums in the order of the tokens.
  const int share = (count + stride - 1) / stride * pack;
  int first = min(count, me * share), beyond = min(count, first + share);
  bool listed = false;
  if (top_k > 0.f || top_p < 1.f) {
    // The list: all tokens above a depth at which they are few. Does what decides stand in it?
    float all = 0.f, deep = -DEEPEST, depth = -12.f, top = 0.f;
    for (int attempt = 0; attempt < 12 && !listed; attempt++) {
      float n = 0.f, mass = 0.f, total = 0.f;
      over(row, begin, count, stride, packed, [&](int i, float x) {
        const float y = (x - best) * scale;
        const float weight = y >= -DEEPEST ? __expf(y) : 0.f;
        if (y >= depth) { n += 1.f; mass += weight; }
        total += weight;
      });
      n = block_sum(n, shared);
      mass = block_sum(mass, shared);
      if (attempt == 0) all = block_sum(total, shared);
      const bool enough = top_k > 0.f ? n >= top_k : mass >= top_p * all;
      if (!enough) {  // the threshold is deeper, where tokens are many
        top = depth;
        break;
      }
      listed = n <= LISTED;
      deep = depth;
      if (!listed) depth *= 0.6f;
    }
    int length = 0;
    if (listed) {
      float mine = 0.f;
      over(row, first, beyond, pack, packed, [&](int i, float x) { mine += (x - best) * scale >= depth ? 1.f : 0.f; });
      int at = int(block_scan(mine, starts) - mine);
      length = int(starts[1023]);
      over(row, first, beyond, pack, packed, [&](int i, float x) {
        const float y = (x - best) * scale;
        if (y >= depth) { list_y[at] = y; list_place[at++] = i; }
      });
      __syncthreads();
      first = min(length, 2 * me), beyond = min(length, first + 2);
    }
    float from = -DEEPEST;
    if (top_k > 0.f) {
      float low = deep, high = top;
      for (int step = 0; step < 26; step++) {
        const float middle = 0.5f * (low + high);
        float n = 0.f;
        if (listed)
          for (int i = first; i < beyond; i++) n += list_y[i] >= middle ? 1.f : 0.f;
        else
          over(row, begin, count, stride, packed, [&](int i, float x) {
            n += (x - best) * scale >= middle ? 1.f : 0.f;
          });
        if (block_sum(n, shared) >= top_k) low = middle; else high = middle;
      }
      cut = fmaxf(cut, low);
      from = low;  // the mass of top-p is that of the top k: min-p cuts beside it, not before
    }
    if (top_p < 1.f) {
      if (top_k > 0.f) {
        all = 0.f;
        if (listed)
          for (int i = first; i < beyond; i++) all += list_y[i] >= from ? __expf(list_y[i]) : 0.f;
        else
          over(row, begin, count, stride, packed, [&](int i, float x) {
            const float y = (x - best) * scale;
            if (y >= from) all += __expf(y);
          });
        all = block_sum(all, shared);
      }
      const float target = top_p * all;
      float low = fmaxf(deep, from), high = top_k > 0.f ? 0.f : top;
      for (int step = 0; step < 26; step++) {
        const float middle = 0.5f * (low + high);
        float mass = 0.f;
        if (listed)
          for (int i = first; i < beyond; i++) mass += list_y[i] >= middle ? __expf(list_y[i]) : 0.f;
        else
          over(row, begin, count, stride, packed, [&](int i, float x) {
            const float y = (x - best) * scale;
            if (y >= middle) mass += __expf(y);
          });
        if (block_sum(mass, shared) >= target) low = middle; else high = middle;
      }
      cut = fmaxf(cut, low);
    }
  }
  float mine = 0.f;
  if (listed)
    for (int i = first; i < beyond; i++) mine += list_y[i] >= cut ? __expf(list_y[i]) : 0.f;
  else
    over(row, first, beyond, pack, packed, [&](int i, float x) {
      const float y = (x - best) * scale;
      if (y >= cut) mine += __expf(y);
    });
  const float beyond_me = block_scan(mine, starts);
  const float target = uniform_of(seeds[line], positions[line]) * starts[1023];
  const float before = beyond_me - mine;
  if (me == 0) tell(place);  // if rounding leaves nobody, the best token stands
  __syncthreads();
  if (mine > 0.f && target >= before && target < beyond_me) {
    float sum = before;
    int chosen = -1;
    for (int i = first; i < beyond; i++) {
      const float y = listed ? list_y[i] : (float(row[i]) - best) * scale;
      if (y >= cut) {
        sum += __expf(y);
        chosen = listed ? list_place[i] : i;
        if (sum > target) break;
      }
    }
    tell(chosen);
  }
"""


def source(told: bool = False) -> str:
    """The body of the kernel. A test compiles it for the CPU and compares it with the reference sampler. `told`: it
    writes tokens to an address besides."""
    return f"#define TOLD {int(told)}\n" + _SOURCE.replace("DEEPEST", f"{DEEPEST}f").replace("LISTED", str(LISTED))


@functools.cache
def _kernel(told: bool) -> Any:
    return cuda_kernel(
        name="millstream_sample",
        input_names=["logits", "settings", "seeds", "positions", *(["told"] if told else [])],
        output_names=["out", "next_positions"],
        source=source(told),
        header=HEADER,
    )


def numbers_of(rows: Sequence[Sampling]) -> NDArray[np.float32]:
    """The settings of each row, in the order that the kernel reads them."""
    found = [(0.0 if row.greedy else row.temperature, row.top_p, row.min_p, row.top_k) for row in rows]
    return np.array(found, dtype=np.float32).reshape(len(rows), 4)


def settings_of(rows: Sequence[Sampling]) -> mx.array:
    return mx.array(numbers_of(rows))


def sample(
    logits: mx.array, settings: mx.array, seeds: mx.array, positions: mx.array, letter: Letter | None = None
) -> tuple[mx.array, mx.array]:
    """One token per row, and the positions of the next step. `settings` come from `settings_of`; `seeds` (rows,) are
    uint32, `positions` (rows,) int32. `letter`: where the tokens are written for the host besides."""
    rows = logits.shape[0]
    tokens, following = _kernel(letter is not None)(
        inputs=[logits, settings, seeds, positions, *([] if letter is None else [letter.address])],
        output_shapes=[(rows,), (rows,)],
        output_dtypes=[mx.int32, mx.int32],
        grid=(rows * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        template=[("T", logits.dtype)],
    )
    return tokens, following
