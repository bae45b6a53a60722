"""Few-row matmuls with packed weights for 9 rows and more, in bands of 32: their CUDA source and the shape of a block.

Each warp copies its part of the weight to shared memory, unpacks it from there and multiplies it with all rows of a
band, which it reads from the cache. On an H200 this is faster than the body for many rows of `packed_source`, whose x
goes through shared memory. It adds in another order, so a pass that stands for a step of few rows takes that one.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from millstream.backend.kernels.matmul_tilings import GROUP, MAX_SHARED, SLICES, WARPS, Body, Tiling, shared_limit
from millstream.backend.kernels.unpack_cuda import form_constants
from millstream.backend.kernels.weights import Packed, PackedForm

MAX_WIDTH = 32
"""Rows of x per block; more rows are more blocks, beside each other. Sums of 64 rows and four tiles need more registers
than there are, and such kernels take long to compile."""
TILES = (4, 2, 1)
FOUR_BITS = PackedForm(4, 64, "affine", biased=True)

HEADER = """
template <int BYTES> __device__ __forceinline__ void mill_fetch_piece(void* to, const void* from, int valid) {
  const unsigned at = (unsigned)__cvta_generic_to_shared(to);
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" :: "r"(at), "l"(from), "r"(valid) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" :: "r"(at), "l"(from), "n"(BYTES), "r"(valid)
      : "memory");
}
"""

# The sums of a packed weight's slice. K is cut into slices of whole units of UNIT numbers; a warp fetches PER units at
# a time, with the scales (and zeros, if MODE is affine) of their groups. A lane fetches what others of its warp use, so
# that warps wait for themselves alone.
PRODUCT = """
  constexpr int CK = UNIT * PER, BLOCKS = CK / 32, WIDE = 16 * MT;
  constexpr int XB = NT >= 4 ? 2 : (8 / NT < BLOCKS ? 8 / NT : BLOCKS);
  constexpr int RB = CK * BITS / 8, WORDS = RB / 16, PITCH = RB + (BITS == 8 ? 32 : 16);
  constexpr int SIZE = MODE == 0 ? 2 : 1, SB = UNIT / GS * SIZE, SPITCH = ALIGNED ? PER * SB : PER * SB + 4;
  constexpr int ARRAYS = MODE == 0 ? 2 : 1, STAGE = WIDE * (PITCH + ARRAYS * SPITCH);
  const int K = w_shape[1] * 32 / BITS, UNITS = (K + UNIT - 1) / UNIT;
  const int row_bytes = K * BITS / 8, scale_bytes = K / GS * SIZE;
  const int begin = int((long long)UNITS * (part * KW + kw) / V) * UNIT;
  const int end = min(K, int((long long)UNITS * (part * KW + kw + 1) / V) * UNIT);
  char* stages = reinterpret_cast<char*>(ring) + warp * DEPTH * STAGE;
  const char* packed = reinterpret_cast<const char*>(w);
  auto row_of = [&](int i) { return line(nw * WIDE + i); };
  auto fetch = [&](int stage) {
    const int k0 = begin + stage * CK;
    if (k0 < end) {
      char* to = stages + stage % DEPTH * STAGE;
      #pragma unroll
      for (int i = lane; i < WIDE * WORDS; i += 32) {
        const int row = i / WORDS, at = k0 / 8 * BITS + i % WORDS * 16;
        const bool inside = at < row_bytes;
        mill_fetch_piece<16>(to + row * PITCH + i % WORDS * 16,
            packed + (size_t)row_of(row) * row_bytes + (inside ? at : 0), inside ? 16 : 0);
      }
      char* first_scale = to + WIDE * PITCH;
      #pragma unroll
      for (int i = lane; i < WIDE * ARRAYS; i += 32) {
        const char* from = reinterpret_cast<const char*>(ALL_SCALES);
        const size_t at = (size_t)row_of(i % WIDE) * scale_bytes + k0 / GS * SIZE;
        if constexpr (ALIGNED) {
          #pragma unroll
          for (int u = 0; u < PER; u++) {
            const bool inside = k0 + u * UNIT < K;
            mill_fetch_piece<SB>(first_scale + i * SPITCH + u * SB, from + at + (inside ? u * SB : 0), inside ? SB : 0);
          }
        } else {
          // From the word before, and not beyond the last.
          const size_t last = (size_t)N * scale_bytes;
          #pragma unroll
          for (int u = 0; u < SPITCH; u += 4) {
            const size_t word = (at & ~(size_t)3) + u;
            const int valid = word >= last ? 0 : last - word < 4 ? (int)(last - word) : 4;
            mill_fetch_piece<4>(first_scale + i * SPITCH + u, from + (valid ? word : 0), valid);
          }
        }
      }
    }
    mill_commit();
  };
  #pragma unroll
  for (int c = 0; c < DEPTH - 1; c++) fetch(c);
  // The rows come from the cache: the next blocks' are on their way while this one's are multiplied.
  uint4 b[XB][NT];
  auto read = [&](int k, uint4* to) {
    #pragma unroll
    for (int n = 0; n < NT; n++)
      if (k < end) to[n] = *reinterpret_cast<const uint4*>(x + (size_t)min(first + n * 8 + g, R - 1) * K + k + t * 8);
  };
  #pragma unroll
  for (int block = 0; block < XB - 1; block++) read(begin + block * 32, b[block]);
  float acc[MT][NT][4] = {};
#if NORM
  float squares[NT][2] = {};
#endif
  for (int stage = 0; begin + stage * CK < end; stage++) {
    mill_wait<DEPTH - 2>();
    __syncwarp();  // what all lanes fetched is there, and what they read before may be overwritten
    fetch(stage + DEPTH - 1);
    const char* at = stages + stage % DEPTH * STAGE;
    const int k0 = begin + stage * CK;
    unsigned scale[MT][2], zero[MT][2];
    #pragma unroll XB
    for (int block = 0; block < BLOCKS; block++) {
      read(k0 + (block + XB - 1) * 32, b[(block + XB - 1) % XB]);
      if (k0 + block * 32 < end) {
        uint4 row[NT];
#if NORM
        const uint4 by = *reinterpret_cast<const uint4*>(norm + k0 + block * 32 + t * 8);
#endif
        #pragma unroll
        for (int n = 0; n < NT; n++) {
          row[n] = b[block % XB][n];
#if NORM
          if (n % NW == nw) mill_squares(row[n], squares[n]);
          row[n].x = mill_times(row[n].x, by.x);
          row[n].y = mill_times(row[n].y, by.y);
          row[n].z = mill_times(row[n].z, by.z);
          row[n].w = mill_times(row[n].w, by.w);
#endif
          row[n] = mill_as_packed<BITS>(row[n]);
        }
        #pragma unroll
        for (int m = 0; m < MT; m++) {
          unsigned a[2][4];
          #pragma unroll
          for (int h = 0; h < 2; h++) {
            const int i = m * 16 + g + h * 8;
            if (block * 32 % GS == 0 || GS < 32) {
              const char* mine = at + WIDE * PITCH + i * SPITCH + (block * 32 + t * 8) / GS * SIZE;
              if constexpr (!ALIGNED) mine += ((size_t)row_of(i) * scale_bytes + k0 / GS * SIZE) & 3;
              scale[m][h] = mill_scale<MODE>(mine);
              zero[m][h] = MODE == 0 ? mill_scale<MODE>(mine + WIDE * SPITCH) : 0;
            }
            mill_unpack<BITS, MODE>(at + i * PITCH + (block * 4 + t) * BITS, scale[m][h], zero[m][h], a[h]);
          }
          #pragma unroll
          for (int n = 0; n < NT; n++) mill_mma(acc[m][n], a[0][0], a[1][0], a[0][1], a[1][1], row[n].x, row[n].y);
          #pragma unroll
          for (int n = 0; n < NT; n++) mill_mma(acc[m][n], a[0][2], a[1][2], a[0][3], a[1][3], row[n].z, row[n].w);
        }
      }
    }
  }
"""


def unit_of(form: PackedForm) -> int:
    """The numbers of a row that a slice of K has at least: whole groups, and scales of at least four bytes."""
    return 256 if form.group_size == 128 else 128


@dataclass(frozen=True, slots=True)
class BandTiling(Tiling):
    """A block's warps, for a weight of this form and so many inputs: one unit is fetched at a time."""

    form: PackedForm = FOUR_BITS
    inputs: int = 4096

    @property
    def body(self) -> Body:
        return "bands"

    @property
    def aligned(self) -> bool:
        """True if each row has whole units, so that its scales begin at whole units too."""
        return self.inputs % unit_of(self.form) == 0

    @property
    def constants(self) -> list[tuple[str, int | bool]]:
        return [
            *self.shape_constants,
            ("DEPTH", self.depth),
            *form_constants(self.form),
            ("UNIT", unit_of(self.form)),
            ("PER", 1),
            ("ALIGNED", self.aligned),
        ]

    def stage_bytes(self, width: int) -> int:
        form, numbers = self.form, unit_of(self.form)
        size, arrays = (2, 2) if form.mode == "affine" else (1, 1)
        scales = numbers // form.group_size * size + (0 if self.aligned else 4)
        padded = numbers * form.bits // 8 + (32 if form.bits == 8 else 16)
        return self.threads // 32 * 16 * self.tiles * (padded + arrays * scales)


def in_bands(weight: Packed, width: int, *, head: int, within: int = 0) -> BandTiling | None:
    """A tiling for a weight; with `head` its tiles are heads of that size, with `within` they are parts of them. Each
    number of x that a warp reads is multiplied with all of its tiles, so there are many if the memory suffices; None if
    it does not."""
    fitting = [tiles for tiles in TILES if within % (16 * tiles) == 0]
    tilings = [_tiling(weight, width, head, tiles) for tiles in fitting]
    return next((tiling for tiling in tilings if tiling is not None), None)


def _tiling(weight: Packed, width: int, head: int, tiles: int) -> BandTiling | None:
    """The tiling with so many tiles per warp; None if it is not possible here."""
    beside, rest = divmod(head, 16 * tiles) if head else (1, 0)
    if rest or beside > 4:
        return None
    along = max(GROUP, WARPS // beside // GROUP * GROUP)
    while True:
        split = SLICES // along if weight.tickets is not None else 1
        tiling = BandTiling(beside, tiles, along, split, form=weight.form, inputs=weight.inputs)
        depth = min(4, max(2, MAX_SHARED // tiling.stage_bytes(width)))
        tiling = dataclasses.replace(tiling, depth=depth)
        if tiling.shared_bytes(width) <= shared_limit():
            return tiling
        if weight.tickets is None or along == GROUP or not head:
            return None
        along //= 2
