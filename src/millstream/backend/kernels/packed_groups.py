"""Few-row matmuls with packed weights in groups of four warps (sm_90): their CUDA source and the shape of a block.

A group holds 64 rows of the weight in registers, unpacked once for all rows of x, which lie in shared memory as in
`warpgroup_source`. Of a unit of 128 numbers a lane has 32 neighbours (`packed_source`), so a product takes them in
another order than x has: whoever fetched 16 bytes of x puts their four pairs where the lanes' pairs meet them. Sums
are cut and added as in `warpgroup_source`, so a row gets bitwise the same numbers at every width of this body. The
bodies of `packed_source` and `packed_bands` give it others; which one a step takes is measured at load
(`layers/packed_choice.py`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from millstream.backend.kernels import matmul_tilings, warpgroup_source
from millstream.backend.kernels.matmul_tilings import GROUP_LINES, PER_MULTIPROCESSOR, RESERVED, WIDTHS, Body, Tiling
from millstream.backend.kernels.multiprocessors import multiprocessors
from millstream.backend.kernels.packed_tilings import FOUR_BITS, UNIT
from millstream.backend.kernels.unpack_cuda import form_constants
from millstream.backend.kernels.weights import Packed, PackedForm

GROUP_WIDTHS = WIDTHS[1:]
"""Rows of x per block. Fewer are padded; more are bands of the last one."""
MOST_DEPTH = 6
"""Units in shared memory: one is multiplied, one is put in order, and more are on their way."""
OTHER_SHARED = 64
"""Bytes of shared memory beside them, at most."""


TAKE = """
template <int BYTES> __device__ __forceinline__ void mill_take(const char* from, unsigned* to) {
  if constexpr (BYTES == 16) {
    const uint4 all = *reinterpret_cast<const uint4*>(from);
    to[0] = all.x;
    to[1] = all.y;
    to[2] = all.z;
    to[3] = all.w;
  } else if constexpr (BYTES == 8) {
    const uint2 all = *reinterpret_cast<const uint2*>(from);
    to[0] = all.x;
    to[1] = all.y;
  } else
    to[0] = *reinterpret_cast<const unsigned*>(from);
}
"""


def _products(width: int, half: bool) -> str:
    """Sixty-four lines of the weight, from registers, times `width` rows, over sixteen numbers."""
    count, kind = width // 2, "f16" if half else "bf16"
    sums = ", ".join(f"%{index}" for index in range(count))
    registers = ", ".join(f'"+f"(sums[{index}])' for index in range(count))
    lines = ", ".join(f"%{count + index}" for index in range(4))
    given = ", ".join(f'"r"(lines[{index}])' for index in range(4))
    return f"""
__device__ __forceinline__ void mill_held_products_{width}(float* sums, const unsigned* lines,
    unsigned long long rows) {{
  asm volatile("{{ .reg .pred p; setp.ne.b32 p, 1, 0; "
    "wgmma.mma_async.sync.aligned.m64n{width}k16.f32.{kind}.{kind} "
    "{{{sums}}}, {{{lines}}}, %{count + 4}, p, 1, 1, 0; }}"
    : {registers} : {given}, "l"(rows));
}}
"""


def header(half: bool) -> str:
    """The helpers of this source, beside those of `warpgroup_source` and `packed_source`."""
    choice = " else ".join(
        f"if constexpr (N == {width}) mill_held_products_{width}(sums, lines, rows);" for width in GROUP_WIDTHS
    )
    products = "".join(_products(width, half) for width in GROUP_WIDTHS)
    return f"""{TAKE}{products}
template <int N>
__device__ __forceinline__ void mill_held_products(float* sums, const unsigned* lines, unsigned long long rows) {{
  {choice}
}}
// A value that is computed once, and kept.
template <typename V> __device__ __forceinline__ void mill_keep(V& value) {{
  if constexpr (sizeof(V) == 8) asm volatile("" : "+l"(value)); else asm volatile("" : "+r"(value));
}}
__device__ __forceinline__ unsigned long long mill_further(unsigned long long tile, int bytes) {{
  return tile + bytes / 16;
}}
__device__ __forceinline__ void mill_commit_products() {{
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}}
template <int N> __device__ __forceinline__ void mill_wait_products() {{
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory");
}}
"""


# `warpgroup_source.SUMS` comes after it. A lane's words of the weight come through shared memory, but nobody else reads
# them; its scales come straight into registers, two units ahead. Lanes beyond the end of K read its begin, and zeros of
# x. Of x a thread has the same chunks of every SWEEP-th line: of both halves of a unit the chunk 4 * t + 2 * half + low
# of 16, whose word j meets what lane t unpacks. The eight threads of a line are in one warp, so they exchange words in
# place. While a unit is multiplied the next one is put in order.
PRODUCT = """
  constexpr int UNIT = 128, PER = GS < 32 ? 32 / GS : 1, BYTES = BITS % 4 == 0 ? 16 : BITS % 2 == 0 ? 8 : 4;
  constexpr int PIECES = BITS * 4 / BYTES, X_BYTES = ROWS * UNIT * 2, STAGE = X_BYTES + TH * BITS * 8;
  constexpr int SWEEP = TH / 8, OWN_X = (ROWS + SWEEP - 1) / SWEEP, CHUNKS = 2 * OWN_X, EACH_TIME = (CHUNKS + 3) / 4;
  const int K = w_shape[1] * 32 / BITS, COUNT = (K + UNIT - 1) / UNIT;
  const int begin = int((long long)COUNT * part / S), count = int((long long)COUNT * (part + 1) / S) - begin;
  char* stages = reinterpret_cast<char*>(ring) + (-(unsigned)__cvta_generic_to_shared(ring) & 1023u);
  const char* from_row[2];
  int from_scale[2];
  #pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = line(warp * 16 + h * 8 + g);
    from_row[h] = reinterpret_cast<const char*>(w) + (size_t)row * (K / 8 * BITS) + t * 4 * BITS;
    from_scale[h] = row * (K / GS) + t * 32 / GS;
    mill_keep(from_row[h]);
    mill_keep(from_scale[h]);
  }
  auto first_of = [&](int step) {
    const int k = (begin + step) * UNIT;
    return !ALIGNED && k + t * 32 >= K ? -t * 32 : k;
  };
  const int chunk = threadIdx.x % 8, mine = threadIdx.x / 8, low = chunk % 2, turned = mine % 8;
  const int column = chunk / 2 * 32 + low * 8;
  int place = mine * 128 + (chunk ^ turned) * 16, target = mine * 128 + chunk / 2 * 4 + (low * 4 ^ turned) * 16;
  mill_keep(place);
  mill_keep(target);
  unsigned xp[OWN_X];  // in chunks
  #pragma unroll
  for (int i = 0; i < OWN_X; i++) {
    xp[i] = (unsigned)min(first + i * SWEEP + mine, R - 1) * (K / 8) + (begin * UNIT + column) / 8;
    mill_keep(xp[i]);
  }
  auto has_line = [&](int i) { return ROWS % SWEEP == 0 || i * SWEEP + mine < ROWS; };
  auto bring = [&](int step, char* to) {
    if (step < count) {
      const int at = first_of(step) / 8 * BITS;
      #pragma unroll
      for (int p = 0; p < 2 * PIECES; p++)
        mill_fetch_piece<BYTES>(to + X_BYTES + (p * TH + threadIdx.x) * BYTES,
            from_row[p / PIECES] + at + p % PIECES * BYTES, BYTES);
      #pragma unroll
      for (int half = 0; half < 2; half++) {
        const int k = (begin + step) * UNIT + column + half * 16;
        const bool inside = ALIGNED || k < K;
        #pragma unroll
        for (int i = 0; i < OWN_X; i++)
          if (has_line(i))
            mill_fetch_row(to + place + (half * ROWS + i * SWEEP) * 128,
                x + (size_t)(xp[i] + (inside ? step * 16 + half * 2 : 0)) * 8,
                inside && i * SWEEP + mine < rows ? 16 : 0);
      }
    }
    mill_commit();
  };
  struct Scales { unsigned scale[2][PER], zero[2][PER]; };
  auto read_scales = [&](int step, Scales& to) {
    if (step < count) {
      #pragma unroll
      for (int i = 0; i < 2 * PER; i++) {
        const int at = from_scale[i / PER] + first_of(step) / GS + i % PER;
        to.scale[i / PER][i % PER] = __ldg(reinterpret_cast<const RAW_SCALE*>(scales) + at);
        to.zero[i / PER][i % PER] = __ldg(reinterpret_cast<const RAW_SCALE*>(ZEROS) + at);
      }
    }
  };
#if NORM
  float squares[OWN_X][2] = {};
  uint4 by[2], scaling[2] = {};
  auto read_norm = [&](int step) {
    #pragma unroll
    for (int half = 0; half < 2; half++) {
      by[half] = scaling[half];
      const int k = (begin + step) * UNIT + column + half * 16;
      if (step < count && (ALIGNED || k < K)) scaling[half] = *reinterpret_cast<const uint4*>(norm + k);
    }
  };
#endif
  // One of four parts of this thread's chunks of x, after they have come.
  auto turn = [&](char* stage, int time) {
    uint4 numbers[EACH_TIME];
    #pragma unroll
    for (int e = 0; e < EACH_TIME; e++) {
      const int c = time * EACH_TIME + e, i = c / 2, half = c % 2;
      if (c < CHUNKS && has_line(i)) {
        numbers[e] = *reinterpret_cast<const uint4*>(stage + place + (half * ROWS + i * SWEEP) * 128);
#if NORM
        mill_squares(numbers[e], squares[i]);
        numbers[e] = mill_scaled(numbers[e], by[half]);
#endif
        numbers[e] = mill_as_packed<BITS>(numbers[e]);
      }
    }
    __syncwarp();
    #pragma unroll
    for (int e = 0; e < EACH_TIME; e++) {
      const int c = time * EACH_TIME + e, i = c / 2, half = c % 2;
      if (c < CHUNKS && has_line(i)) {
        const unsigned words[4] = {numbers[e].x, numbers[e].y, numbers[e].z, numbers[e].w};
        #pragma unroll
        for (int j = 0; j < 4; j++)
          *reinterpret_cast<unsigned*>(stage + (target ^ j * 16) + (half * ROWS + i * SWEEP) * 128) = words[j];
      }
    }
  };
  Scales held[2];
  read_scales(0, held[0]);
  read_scales(1, held[1]);
  #pragma unroll
  for (int c = 0; c < DEPTH - 1; c++) bring(c, stages + c * STAGE);
#if NORM
  read_norm(0);
  read_norm(1);
#endif
  mill_wait<DEPTH - 2>();
  if (count > 0) {
    #pragma unroll
    for (int time = 0; time < 4; time++) turn(stages, time);
  }
  mill_expose();
  __syncthreads();
  float acc[NT * 4] = {};
  char *stage = stages, *before = stages + (DEPTH - 1) * STAGE;
  auto multiply = [&](int step, Scales& own) {
    char* const after = stage == stages + (DEPTH - 1) * STAGE ? stages : stage + STAGE;
    mill_wait<DEPTH - 3>();
    bring(step + DEPTH - 1, before);
#if NORM
    read_norm(step + 2);
#endif
    const unsigned long long tile = mill_tile(stage);
    unsigned words[2][BITS], scale[2][PER], zero[2][PER] = {};
    #pragma unroll
    for (int p = 0; p < 2 * PIECES; p++)
      mill_take<BYTES>(stage + X_BYTES + (p * TH + threadIdx.x) * BYTES, words[p / PIECES] + p % PIECES * (BYTES / 4));
    #pragma unroll
    for (int i = 0; i < 2 * PER; i++) {
      scale[i / PER][i % PER] = mill_scale_of<MODE>(own.scale[i / PER][i % PER]);
      if (MODE == 0) zero[i / PER][i % PER] = mill_scale_of<MODE>(own.zero[i / PER][i % PER]);
    }
    read_scales(step + 2, own);
    unsigned lines[2][2][4];
    #pragma unroll
    for (int block = 0; block < 4; block++) {
      if (block > 1) mill_wait_products<1>();  // what was multiplied two blocks before may be overwritten
      unsigned pairs[2][4];
      #pragma unroll
      for (int h = 0; h < 2; h++)
        mill_unpack_words<BITS, MODE>(words[h], block, scale[h][block * PER / 4], zero[h][block * PER / 4], pairs[h]);
      #pragma unroll
      for (int p = 0; p < 8; p++) lines[block % 2][p / 4][p % 4] = pairs[p % 2][p / 2];
      mill_hold<NT * 4>(acc);
      mill_begin_products();
      #pragma unroll
      for (int half = 0; half < 2; half++)
        mill_held_products<ROWS>(acc, lines[block % 2][half],
            mill_further(tile, block / 2 * ROWS * 128 + block % 2 * 64 + half * 32));
      mill_commit_products();
      if (step + 1 < count) turn(after, block);
    }
    mill_wait_products<0>();
    mill_hold<NT * 4>(acc);
    mill_expose();
    __syncthreads();
    before = stage;
    stage = after;
  };
  #pragma unroll 1
  for (int step = 0; step < count; step += 2) {
    multiply(step, held[0]);
    if (step + 1 < count) multiply(step + 1, held[1]);
  }
"""


@dataclass(frozen=True, slots=True)
class GroupTiling(Tiling):
    """A block's warps, for a weight of this form and so many inputs."""

    form: PackedForm = FOUR_BITS
    inputs: int = 4096

    @property
    def body(self) -> Body:
        return "groups"

    @property
    def constants(self) -> list[tuple[str, int | bool]]:
        return [
            *self.shape_constants,
            ("DEPTH", self.depth),
            *form_constants(self.form),
            ("ALIGNED", self.inputs % UNIT == 0),
        ]

    def stage_bytes(self, width: int) -> int:
        return width * UNIT * 2 + self.threads * self.form.bits * 8


def takes(head: int = 0, within: int = 0) -> bool:
    """True if this body can be taken here, for tiles that are heads of a size, or parts of heads."""
    whole = not head or head in (GROUP_LINES, 2 * GROUP_LINES)
    return matmul_tilings.has_warpgroups() and whole and within % GROUP_LINES == 0


def parts_of(weight: Packed) -> int:
    """How many blocks share a tile. They need counters: a weight without has no such blocks, at any width."""
    return 1 if weight.tickets is None else matmul_tilings.parts_of(weight.outputs)


def width_of(rows: int) -> int:
    return next((width for width in GROUP_WIDTHS if rows <= width), GROUP_WIDTHS[-1])


def in_groups(weight: Packed, width: int, *, head: int = 0, within: int = 0) -> GroupTiling:
    """The tiling for a weight; with `head`, tiles are heads of that size, and parts of heads with `within`."""
    parts, lines = parts_of(weight), head or GROUP_LINES
    # Every block puts all rows in order: with twice the lines, half as often, if there are enough blocks still.
    enough = weight.outputs * parts >= PER_MULTIPROCESSOR * GROUP_LINES * multiprocessors()
    if not head and enough and within % (2 * lines) == 0:
        lines *= 2
    tiling = GroupTiling(lines // 16, 1, 1, parts, group=1, warpgroups=True, form=weight.form, inputs=weight.inputs)
    alone = -(-weight.outputs // lines) * parts <= multiprocessors()
    limit = matmul_tilings.shared_limit()
    room = limit if alone else (limit + RESERVED) // 2 - RESERVED
    depth = (room - OTHER_SHARED - warpgroup_source.PIECE) // tiling.stage_bytes(width)
    return dataclasses.replace(tiling, depth=min(MOST_DEPTH, max(matmul_tilings.MIN_DEPTH, depth)))
