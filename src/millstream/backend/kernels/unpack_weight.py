"""A packed weight as a matrix, by a kernel that does nothing but read and write.

MLX's own kernel takes three times as long as the memory needs (H200), and a prompt's pass unpacks every weight once.
"""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx

from millstream.backend.kernels.compiled import cuda_kernel
from millstream.backend.kernels.unpack_cuda import MODES, unpack_source
from millstream.backend.kernels.weights import Packed

THREADS, EACH = 256, 4
"""Of a block, and how many times eight numbers each thread unpacks: it reads all of them before it writes."""

_SOURCE = """
  const size_t count = (size_t)w_shape[0] * w_shape[1] * 4 / BITS;  // eights
  const size_t first = (size_t)blockIdx.x * THREADS * EACH + threadIdx.x;
  const char* packed = reinterpret_cast<const char*>(w);
  unsigned low[EACH], high[EACH], scale[EACH], zero[EACH];
  #pragma unroll
  for (int i = 0; i < EACH; i++) {
    const size_t eight = min(first + i * THREADS, count - 1), group = eight * 8 / GS;
    low[i] = high[i] = 0u;
    if constexpr (BITS == 4) {
      low[i] = __ldg(w + eight);
    } else if constexpr (BITS == 8) {
      const uint2 both = __ldg(reinterpret_cast<const uint2*>(w) + eight);
      low[i] = both.x;
      high[i] = both.y;
    } else {
      #pragma unroll
      for (int b = 0; b < BITS; b++) {
        const unsigned byte = __ldg(reinterpret_cast<const unsigned char*>(packed) + eight * BITS + b);
        if (b < 4) low[i] |= byte << 8 * b; else high[i] |= byte << 8 * (b - 4);
      }
    }
    scale[i] = mill_scale<MODE>(reinterpret_cast<const char*>(scales + group));
    zero[i] = MODE == 0 ? mill_scale<MODE>(reinterpret_cast<const char*>(ZEROS + group)) : 0u;
  }
  #pragma unroll
  for (int i = 0; i < EACH; i++) {
    unsigned two[4];
    mill_unpack_bits<BITS, MODE>(low[i], high[i], scale[i], zero[i], two);
    if (first + i * THREADS < count)
      reinterpret_cast<uint4*>(out)[first + i * THREADS] =
          mill_in_order<BITS>(make_uint4(two[0], two[1], two[2], two[3]));
  }
"""


@functools.cache
def _kernel(dtype: mx.Dtype, affine: bool) -> Any:
    zeros = "zeros" if affine else "scales"
    return cuda_kernel(
        name="millstream_unpack",
        input_names=["w", "scales", *(["zeros"] if affine else [])],
        output_names=["out"],
        source=f"#define ZEROS {zeros}\n" + _SOURCE,
        header=unpack_source(dtype),
    )


def unpack(weight: Packed, dtype: mx.Dtype) -> mx.array:
    """The weight as (outputs, inputs), for what `packed_tilings.fits` allows."""
    affine = weight.biases is not None
    eights = weight.outputs * weight.inputs // 8
    blocks = -(-eights // (THREADS * EACH))
    made: list[mx.array] = _kernel(dtype, affine)(
        inputs=[weight.packed, weight.scales, *([weight.biases] if affine else [])],
        output_shapes=[(weight.outputs, weight.inputs)],
        output_dtypes=[dtype],
        grid=(blocks * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        template=[
            ("BITS", weight.bits),
            ("GS", weight.group_size),
            ("MODE", MODES[weight.mode]),
            ("THREADS", THREADS),
            ("EACH", EACH),
        ],
    )
    return made[0]
