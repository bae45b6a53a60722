"""What stands after a matmul of many rows, as one CUDA launch each: heads with their norms and RoPE, and a gated unit.

cuBLAS computes such a matmul, and MLX's operations would take eight launches for the heads, most of them copies: parts
of a joined projection are no contiguous arrays. Few rows have all of this in the matmul itself (`small_matmul`).
"""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx

from millstream.backend.kernels.compiled import cuda_kernel
from millstream.backend.kernels.matmul_source import ACTIVATED
from millstream.backend.kernels.weights import Norm

WARPS = 8
"""Of a block; each has a head of a token."""
NUMBERS = 8
"""That a thread of a gated unit has."""

# Numbers are rounded where MLX's own operations round them. Numbers that RoPE turns together are in one thread.
_HEADS = """
  constexpr int EACH = D / 32, ALL = H + 2 * KV;
  const int lane = threadIdx.x % 32, L = joined_shape[1], tokens = joined_shape[0] * L;
  const int unit = blockIdx.x * (TH / 32) + threadIdx.x / 32, token = unit / ALL, head = unit % ALL;
  if (token >= tokens) return;
  const int row = token / L, column = token % L;
  const T* from = joined + (size_t)unit * D + lane;
  float numbers[EACH];
  #pragma unroll
  for (int i = 0; i < EACH; i++) numbers[i] = float(from[i * 32]);
#if HEAD_NORM
  if (head < H + KV) {
    float square = 0.f;
    #pragma unroll
    for (int i = 0; i < EACH; i++) square += numbers[i] * numbers[i];
    #pragma unroll
    for (int o = 16; o; o /= 2) square += __shfl_xor_sync(0xffffffffu, square, o);
    const float length = rsqrtf(square / D + (head < H ? Q_EPS : K_EPS));
    const auto* scale = (head < H ? q_norm : k_norm) + lane;
    #pragma unroll
    for (int i = 0; i < EACH; i++) numbers[i] = float(T(float(T(numbers[i] * length)) * float(scale[i * 32])));
  }
#endif
#if ROPE
  if (head < H + KV) {
    const float position = float(offset[row] + column);
    #pragma unroll
    for (int i = 0; i < HALF; i++) {
      const float one = TURNED(numbers[i]), two = TURNED(numbers[i + HALF]);
      float sine, cosine;
      sincosf(position * (1.f / periods[i * 32 + lane]), &sine, &cosine);
      numbers[i] = one * cosine - two * sine;
      numbers[i + HALF] = one * sine + two * cosine;
    }
  }
#endif
  T* to = head < H ? q + (((size_t)row * H + head) * L + column) * D
      : head < H + KV ? keys + (((size_t)row * KV + head - H) * L + column) * D
                      : values + (((size_t)row * KV + head - H - KV) * L + column) * D;
  #pragma unroll
  for (int i = 0; i < EACH; i++) to[i * 32 + lane] = T(numbers[i]);
"""

# A thread has neighbours of one row: their gates and what they gate.
_GLU = """
  constexpr int N = 16 / sizeof(T);
  const int half = joined_shape[2] / 2, pieces = half / N;
  const size_t piece = (size_t)blockIdx.x * TH + threadIdx.x, row = piece / pieces;
  if (row >= (size_t)joined_shape[0] * joined_shape[1]) return;
  const T* from = joined + row * 2 * half + piece % pieces * N;
  const uint4 gates = *reinterpret_cast<const uint4*>(from), ups = *reinterpret_cast<const uint4*>(from + half);
  T first[N], second[N];
  memcpy(first, &gates, 16);
  memcpy(second, &ups, 16);
  #pragma unroll
  for (int i = 0; i < N; i++) {
    const float gate = float(first[i]), up = float(second[i]);
    first[i] = T(ACTIVATED);
  }
  uint4 made;
  memcpy(&made, first, 16);
  *reinterpret_cast<uint4*>(out + piece * N) = made;
"""


@functools.cache
def _heads_kernel(constants: tuple[tuple[str, str], ...], inputs: tuple[str, ...]) -> Any:
    flags = {"HEAD_NORM": "0", "ROPE": "0"} | dict(constants)
    return cuda_kernel(
        name="millstream_heads",
        input_names=list(inputs),
        output_names=["q", "keys", "values"],
        source="".join(f"#define {name} {value}\n" for name, value in flags.items()) + _HEADS,
    )


def fits_heads(size: int, periods: mx.array | None, dtype: mx.Dtype) -> bool:
    """True if `heads_of` can take heads of this size with this RoPE."""
    return dtype in (mx.bfloat16, mx.float16) and size % 32 == 0 and (periods is None or periods.shape[0] % 32 == 0)


def heads_of(
    joined: mx.array,
    offset: mx.array,
    periods: mx.array | None,
    heads: int,
    groups: int,
    size: int,
    *,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
    factor: float = 1.0,
) -> tuple[mx.array, mx.array, mx.array]:
    """A joined projection, (rows, length, all), as queries, keys and values, (rows, heads or groups, length, size):
    what `matmul_reference.qkv_rope` does after its product."""
    rows, length, _ = joined.shape
    inputs = {"joined": joined}
    constants: dict[str, str] = {}
    if q_norm is not None and k_norm is not None:
        inputs |= {"q_norm": q_norm.weight, "k_norm": k_norm.weight}
        constants |= {"HEAD_NORM": "1", "Q_EPS": f"{q_norm.eps!r}f", "K_EPS": f"{k_norm.eps!r}f"}
    if periods is not None:
        inputs |= {"offset": offset, "periods": periods}
        turned = "(v)" if factor == 1.0 else f"float(T((v) * {float(factor)!r}f))"
        constants |= {"ROPE": "1", "HALF": str(periods.shape[0] // 32), "TURNED(v)": turned}
    units = rows * length * (heads + 2 * groups)
    threads = 32 * WARPS
    queries, keys, values = _heads_kernel(tuple(constants.items()), tuple(inputs))(
        inputs=list(inputs.values()),
        output_shapes=[(rows, count, length, size) for count in (heads, groups, groups)],
        output_dtypes=[joined.dtype] * 3,
        grid=(-(-units // WARPS) * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        template=[("T", joined.dtype), ("TH", threads), ("H", heads), ("KV", groups), ("D", size)],
    )
    return queries, keys, values


@functools.cache
def _glu_kernel(activation: str) -> Any:
    return cuda_kernel(
        name="millstream_gate",
        input_names=["joined"],
        output_names=["out"],
        source=f"#define ACTIVATED {ACTIVATED[activation]}\n{_GLU}",
    )


def fits_glu(joined: mx.array) -> bool:
    """True if `gated` can take this."""
    return joined.ndim == 3 and joined.dtype in (mx.bfloat16, mx.float16) and joined.shape[-1] % (2 * NUMBERS) == 0


def gated(joined: mx.array, activation: str) -> mx.array:
    """activation(gate) * up of a joined projection, (rows, length, both)."""
    rows, length, both = joined.shape
    out: mx.array
    threads = 32 * WARPS
    (out,) = _glu_kernel(activation)(
        inputs=[joined],
        output_shapes=[(rows, length, both // 2)],
        output_dtypes=[joined.dtype],
        grid=(-(-(rows * length * both // 2 // NUMBERS) // threads) * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        template=[("T", joined.dtype), ("TH", threads)],
    )
    return out
