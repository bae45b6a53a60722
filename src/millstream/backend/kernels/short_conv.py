"""One step of a short, gated convolution (LFM2) as a CUDA kernel: MLX takes eight operations for it.

A layer projects its input to three numbers per channel: what goes in is the first times the third, the convolution
runs over it and the last few that went in, and the second multiplies what comes out.
"""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx

from millstream.backend.kernels.compiled import cuda_kernel

THREADS = 256

_SOURCE = """
  const int channels = w_shape[0], kernel = w_shape[1], i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < projected_shape[0] * channels) {
    const int row = i / channels, c = i % channels;
    const T* from = projected + (size_t)row * 3 * channels + c;
    const size_t first = (size_t)row * (kernel - 1) * channels + c;
    const T fresh = T(float(from[0]) * float(from[2 * channels]));
    float sum = 0.f;
    for (int k = 0; k < kernel - 1; k++) {
      const T old = state[first + k * channels];
      sum += float(w[c * kernel + k]) * float(old);
      if (k > 0) kept[first + (k - 1) * channels] = old;
    }
    sum += float(w[c * kernel + kernel - 1]) * float(fresh);
    kept[first + (kernel - 2) * channels] = fresh;
    out[i] = T(float(from[channels]) * float(T(sum)));
  }
"""


@functools.cache
def _kernel() -> Any:
    return cuda_kernel(
        name="millstream_short_conv",
        input_names=["projected", "state", "w"],
        output_names=["out", "kept"],
        source=_SOURCE,
    )


_STEPS_SOURCE = """
  const int channels = w_shape[0], kernel = w_shape[1], i = blockIdx.x * blockDim.x + threadIdx.x;
  const int rows = state_shape[0], flat = projected_shape[0];
  if (i >= flat * channels) return;
  if (i / channels >= rows * LENGTH) out[i] = T(0.f);
  if (i >= rows * channels) return;
  const int row = i / channels, c = i % channels;
  T* const columns = seen + (size_t)row * (kernel - 1 + LENGTH) * channels + c;
  for (int k = 0; k < kernel - 1; k++) columns[k * channels] = state[((size_t)row * (kernel - 1) + k) * channels + c];
  for (int t = 0; t < LENGTH; t++) {
    const T* from = projected + (size_t)(row * LENGTH + t) * 3 * channels + c;
    const T fresh = T(float(from[0]) * float(from[2 * channels]));
    float sum = 0.f;
    for (int k = 0; k < kernel - 1; k++) {
      const T old = columns[(t + k) * channels];
      sum += float(w[c * kernel + k]) * float(old);
    }
    sum += float(w[c * kernel + kernel - 1]) * float(fresh);
    columns[(t + kernel - 1) * channels] = fresh;
    out[(size_t)(row * LENGTH + t) * channels + c] = T(float(from[channels]) * float(T(sum)));
  }
"""


@functools.cache
def _steps_kernel() -> Any:
    return cuda_kernel(
        name="millstream_short_conv_steps",
        input_names=["projected", "state", "w"],
        output_names=["out", "seen"],
        source=_STEPS_SOURCE,
    )


def short_conv_steps(projected: mx.array, state: mx.array, weight: mx.array, length: int) -> tuple[mx.array, mx.array]:
    """Several tokens of each row, (flat rows, 1, three times the channels): the output, (flat rows, 1, channels), with
    the numbers of `short_conv`; and all columns that went in, (rows, kernel - 1 + length, channels)."""
    flat, _, size = projected.shape
    rows, kept, channels = state.shape
    out, seen = _steps_kernel()(
        inputs=[projected, state, weight],
        output_shapes=[(flat, 1, size // 3), (rows, kept + length, channels)],
        output_dtypes=[projected.dtype, projected.dtype],
        grid=(-(-flat * size // 3 // THREADS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        template=[("T", projected.dtype), ("LENGTH", length)],
    )
    return out, seen


_PROMPTS_SOURCE = """
  const int channels = w_shape[0], kernel = w_shape[1], i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < projected_shape[0] * channels) {
    const int token = i / channels, c = i % channels, position = positions[token];
    float sum = 0.f;
    T fresh = T(0.f);
    for (int back = kernel - 1; back >= 0; back--) {
      if (back > 0 && back > position) continue;
      const T* from = projected + (size_t)(token - back) * 3 * channels + c;
      fresh = T(float(from[0]) * float(from[2 * channels]));
      sum += float(w[c * kernel + kernel - 1 - back]) * float(fresh);
    }
    if (token < kernel - 1) columns[i] = T(0.f);
    columns[i + (kernel - 1) * channels] = fresh;
    out[i] = T(float(projected[(size_t)token * 3 * channels + channels + c]) * float(T(sum)));
  }
"""


@functools.cache
def _prompts_kernel() -> Any:
    return cuda_kernel(
        name="millstream_short_conv_prompts",
        input_names=["projected", "positions", "w"],
        output_names=["out", "columns"],
        source=_PROMPTS_SOURCE,
    )


def short_conv_prompts(projected: mx.array, positions: mx.array, weight: mx.array) -> tuple[mx.array, mx.array]:
    """Prompts that stand one after the other, at least as many tokens as the kernel has taps: (tokens, 1, three times
    the channels). `positions`, (tokens,): of each token in its prompt. The output, (tokens, 1, channels), with the
    numbers of `short_conv`; and all columns that went in, (kernel - 1 + tokens, channels), of which the first ones are
    zeros."""
    tokens = projected.shape[0]
    channels, taps, _ = weight.shape
    out, columns = _prompts_kernel()(
        inputs=[projected, positions, weight],
        output_shapes=[(tokens, 1, channels), (taps - 1 + tokens, channels)],
        output_dtypes=[projected.dtype, projected.dtype],
        grid=(-(-tokens * channels // THREADS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        template=[("T", projected.dtype)],
    )
    return out, columns


def short_conv(projected: mx.array, state: mx.array, weight: mx.array) -> tuple[mx.array, mx.array]:
    """The output, (rows, 1, channels), and the new state, (rows, kernel - 1, channels). `projected` is (rows, 1, three
    times the channels), `weight` (channels, kernel, 1)."""
    rows, _, size = projected.shape
    count = rows * size // 3
    out, kept = _kernel()(
        inputs=[projected, state, weight],
        output_shapes=[(rows, 1, size // 3), state.shape],
        output_dtypes=[projected.dtype, projected.dtype],
        grid=(-(-count // THREADS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        template=[("T", projected.dtype)],
    )
    return out, kept
