"""A CUDA kernel that writes the keys and values of rows that join a batch into their slots, in place.

MLX copies a whole buffer to change a part of it while the device still reads it: gigabytes with rows of 8,000 tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

THREADS = 256

# A block copies some tokens of one head of one row, 16 bytes per thread where they are aligned. `part` is an input that
# is written to: MLX does not know it, so the next read of the buffer must be in another evaluation.
_SOURCE = """
  constexpr int V = 16 / sizeof(T);
  const int head = blockIdx.y, row = blockIdx.z, length = rows_shape[2];
  const T* from = rows + row * rows_strides[0] + head * rows_strides[1];
  T* to = const_cast<T*>(part) + (((size_t)places[row] * part_shape[1] + head) * part_shape[2] + start[0]) * D;
  const int first = blockIdx.x * blockDim.x + threadIdx.x, stride = gridDim.x * blockDim.x;
  if (D % V == 0 && rows_strides[3] == 1 && rows_strides[2] % V == 0 && (size_t)from % 16 == 0) {
    for (int i = first; i < length * (D / V); i += stride) {
      const int token = i / (D / V), at = i % (D / V) * V;
      *(uint4*)(to + (size_t)token * D + at) = *(const uint4*)(from + token * rows_strides[2] + at);
    }
  } else {
    for (int i = first; i < length * D; i += stride)
      to[i] = from[i / D * rows_strides[2] + i % D * rows_strides[3]];
  }
  if (blockIdx.x + blockIdx.y + blockIdx.z + threadIdx.x == 0) out[0] = 1;
"""


@functools.cache
def _kernel() -> Any:
    return mx.fast.cuda_kernel(
        name="millstream_write_rows",
        input_names=["part", "rows", "places", "start"],
        output_names=["out"],
        source=_SOURCE,
        ensure_row_contiguous=False,
    )


def write_rows(part: mx.array, rows: mx.array, slots: Sequence[int], start: int) -> mx.array:
    """Write `rows`, (count, heads, length, size), to some slots of `part`, (slots, heads, columns, size), from column
    `start` on. The result must be evaluated before anything else reads the buffer."""
    count, heads, length, size = rows.shape
    blocks = min(64, -(-length * size * rows.dtype.size // (16 * THREADS)))
    (out,) = _kernel()(
        inputs=[part, rows, mx.array(list(slots), dtype=mx.int32), mx.array([start], dtype=mx.int32)],
        output_shapes=[(1,)],
        output_dtypes=[mx.int32],
        grid=(blocks * THREADS, heads, count),
        threadgroup=(THREADS, 1, 1),
        template=[("T", part.dtype), ("D", size)],
    )
    result: mx.array = out
    return result
