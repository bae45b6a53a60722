"""CUDA source of what a matmul with a packed weight does with its sums: see `packed_matmul`.

An epilogue sees `sum(row, col)` for the rows of x and the WIDE rows of the weight that a block has, `from_row` and `r0`
where those begin, and `live`, how many rows of x there are. `tiling` says which rows of the weight share a block.
"""

from __future__ import annotations

SINGLE_TILES = "  constexpr int SIDE = MT, GROUP = 1, APART = 0;\n"
PAIRED_TILES = "  constexpr int SIDE = MT / 2;\n  const int GROUP = w_shape[0] / (16 * MT), APART = w_shape[0] / 2;\n"
HALF_HEAD_TILES = "  constexpr int SIDE = MT / 2, GROUP = D / (16 * MT), APART = D / 2;\n"

STORE = """
  for (int i = threadIdx.x; i < live * WIDE; i += W * 32) {
    const int row = i / WIDE, col = i % WIDE;
    out[(size_t)(from_row + row) * N + r0 + col] = T(sum(row, col));
  }
"""

ADD = """
  for (int i = threadIdx.x; i < live * WIDE; i += W * 32) {
    const int row = i / WIDE, col = i % WIDE;
    const size_t at = (size_t)(from_row + row) * N + r0 + col;
    out[at] = T(float(T(sum(row, col) * FACTOR)) + float(residual[at]));
  }
"""

GLU = """
  for (int i = threadIdx.x; i < live * WIDE / 2; i += W * 32) {
    const int row = i / (WIDE / 2), col = i % (WIDE / 2);
    float gate = sum(row, col), up = sum(row, col + WIDE / 2);
    ACTIVATE
    out[(size_t)(from_row + row) * (N / 2) + r0 + col] = T(float(T(gate)) * up);
  }
"""
ACTIVATIONS = {
    "silu": "gate = gate / (1.f + __expf(-gate));",
    "gelu": "gate = 0.5f * gate * (1.f + erff(gate * 0.70710678f));",
    "gelu_tanh": "gate = 0.5f * gate * (1.f + tanhf(0.79788456f * (gate + 0.044715f * gate * gate * gate)));",
    "clipped": "gate = fminf(gate, 7.f); up = fminf(fmaxf(up, -7.f), 7.f) + 1.f; gate /= 1.f + __expf(-1.702f * gate);",
}
"""What `matmul_reference.ACTIVATIONS` computes."""

ROPE = """
  const int head = r0 / D, begin = r0 % D;
  for (int i = threadIdx.x; i < live * WIDE / 2; i += W * 32) {
    const int row = from_row + i / (WIDE / 2), col = i % (WIDE / 2), d = begin + col;
    float one = sum(i / (WIDE / 2), col), two = sum(i / (WIDE / 2), col + WIDE / 2);
    if (head < H + KV) {
      float sine, cosine;
      sincosf(float(offset[row]) * (1.f / periods[d]), &sine, &cosine);
      const float turned = one * cosine - two * sine;
      two = two * cosine + one * sine;
      one = turned;
    }
    T* to = head < H ? q + ((size_t)row * H + head) * D
        : head < H + KV ? keys + ((size_t)row * KV + head - H) * D : values + ((size_t)row * KV + head - H - KV) * D;
    to[d] = T(one);
    to[d + D / 2] = T(two);
  }
"""
"""RoPE over all of a head, whose halves are in one block."""

HEADS = """
  const int head = r0 / D;
  for (int i = warp; i < live; i += W) {
    const int row = from_row + i;
    T* to = head < H ? q + ((size_t)row * H + head) * D
        : head < H + KV ? keys + ((size_t)row * KV + head - H) * D : values + ((size_t)row * KV + head - H - KV) * D;
    float v[D / 32];
    #pragma unroll
    for (int c = 0; c < D / 32; c++) v[c] = sum(i, lane + c * 32);
    if (head < H + KV) {
      HEAD_NORM
      HEAD_TURN
    }
    #pragma unroll
    for (int c = 0; c < D / 32; c++) to[lane + c * 32] = T(v[c]);
  }
"""
"""Norms of single heads and RoPE of their first 2 * P numbers. All of a head is in one block."""
HEAD_NORM = """
      float squares = 0.f;
      #pragma unroll
      for (int c = 0; c < D / 32; c++) squares += v[c] * v[c];
      #pragma unroll
      for (int lanes = 16; lanes; lanes /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, lanes);
      const float by = rsqrtf(squares / D + (head < H ? Q_EPS : K_EPS));
      #pragma unroll
      for (int c = 0; c < D / 32; c++)
        v[c] = float(T(v[c] * by * float(head < H ? q_scale[lane + c * 32] : k_scale[lane + c * 32])));
"""
HEAD_TURN = """
      __syncwarp();
      #pragma unroll
      for (int c = 0; c < D / 32; c++) totals[i * LINE + lane + c * 32] = v[c];
      __syncwarp();
      #pragma unroll
      for (int c = 0; c < D / 32; c++) {
        const int d = lane + c * 32;
        if (d < 2 * P) {
          float sine, cosine;
          sincosf(float(offset[row]) * (1.f / periods[d % P]), &sine, &cosine);
          const float other = FACTOR * totals[i * LINE + (d < P ? d + P : d - P)];
          v[c] = FACTOR * v[c] * cosine + (d < P ? -other : other) * sine;
        }
      }
"""
