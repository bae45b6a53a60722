"""The CUDA source of matmuls for the fewest rows: blocks that walk over the tiles of a weight, dense or packed.

With one tile per block a block waits for its first numbers, and nothing is read for it while it adds its sums up: for
few rows, where all time is reading, that is a tenth. Here there are as many blocks as the GPU runs at once, and each
takes one tile after the other. While it sums and stores one, the next one's numbers are on their way. Every number is
computed as by `matmul_source.PRODUCT` or `packed_source.PRODUCT`, in the same order, so a row gets the same numbers
from both.
"""

from __future__ import annotations

# `coming` and `ahead`: tile and step that are fetched next. `slot` is where they go, `here` where the oldest lie.
DENSE_START = """
  const int K = w_shape[1], STEPS = K / 64, TILES = (N + BN - 1) / BN;
  const int begin = int((long long)STEPS * kw / V);
  const int count = int((long long)STEPS * (kw + 1) / V) - begin;
  constexpr int STAGE = TH * MT * 4;
  const T* wp = w + begin * 64 + lane % 8 * 8;
  const int own = warp * MT * 128, place = lane / 8 * 8 + (lane % 8 ^ lane / 8 % 2 * 4);
  int coming = tile, ahead = 0, slot = 0, here = 0, lines[MT * 4];
  auto aim = [&]() {
    #pragma unroll
    for (int i = 0; i < MT * 4; i++) lines[i] = line_of(coming, nw * MT * 16 + i * 4 + lane / 8);
  };
  aim();
  auto fetch = [&]() {
    if (coming < TILES && ahead < count) {
      uint4* stage = ring + slot * STAGE + own + place;
      #pragma unroll
      for (int i = 0; i < MT * 4; i++) mill_stream(stage + i * 32, wp + (size_t)lines[i] * K + ahead * 64);
      if (++ahead == count) {
        ahead = 0;
        coming += gridDim.x;
        aim();
      }
    }
    slot = slot + 1 == DEPTH ? 0 : slot + 1;
    mill_commit();
  };
  #pragma unroll
  for (int c = 0; c < DEPTH - 1; c++) fetch();
  // Of x, and of the norm's weight, the next half of a step is on its way: after the last one, the first again.
  uint4 next[NT];
  const T* xp[NT];
  #pragma unroll
  for (int n = 0; n < NT; n++) xp[n] = x + (size_t)min(n * 8 + g, R - 1) * K + begin * 64 + t * 8;
  auto read = [&](int half) {
    #pragma unroll
    for (int n = 0; n < NT; n++) next[n] = *reinterpret_cast<const uint4*>(xp[n] + half * 32);
  };
  if (count > 0) read(0);
#if NORM
  const T* np = norm + begin * 64 + t * 8;
  uint4 scale = {};
  auto read_norm = [&](int half) { scale = *reinterpret_cast<const uint4*>(np + half * 32); };
  if (count > 0) read_norm(0);
#endif
  float* totals = reinterpret_cast<float*>(ring + DEPTH * STAGE);
"""

LOOP = """
  #pragma unroll 1
  for (; tile < TILES; tile += gridDim.x) {
"""

DENSE_PRODUCT = """
  float acc[MT][NT][4] = {};
#if NORM
  float squares[NT][2] = {};
#endif
  #pragma unroll 1
  for (int c = 0; c < count; c++) {
    mill_wait<DEPTH - 2>();
    __syncwarp();
    fetch();
    const uint4* stage = ring + here * STAGE + own;
    here = here + 1 == DEPTH ? 0 : here + 1;
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      const int at = g * 8 + ((h ^ g % 2) * 4 + t), then = h == 1 && c + 1 == count ? 0 : 2 * c + h + 1;
      uint4 a[MT][2], b[NT];
      #pragma unroll
      for (int m = 0; m < MT; m++) {
        a[m][0] = stage[m * 128 + at];
        a[m][1] = stage[m * 128 + 64 + at];
      }
      #pragma unroll
      for (int n = 0; n < NT; n++) b[n] = next[n];
      read(then);
#if NORM
      const uint4 scaled = scale;
      read_norm(then);
      #pragma unroll
      for (int n = 0; n < NT; n++) {
        if (n % NW == nw) mill_squares(b[n], squares[n]);
        b[n] = mill_scaled(b[n], scaled);
      }
#endif
      #pragma unroll
      for (int n = 0; n < NT; n++)
        #pragma unroll
        for (int m = 0; m < MT; m++) mill_mma(acc[m][n], a[m][0].x, a[m][1].x, a[m][0].y, a[m][1].y, b[n].x, b[n].y);
      #pragma unroll
      for (int n = 0; n < NT; n++)
        #pragma unroll
        for (int m = 0; m < MT; m++) mill_mma(acc[m][n], a[m][0].z, a[m][1].z, a[m][0].w, a[m][1].w, b[n].z, b[n].w);
    }
  }
"""

END = """
    __syncthreads();
  }
"""

PACKED_START = """
  constexpr int CK = UNIT * PER, BLOCKS = CK / 32, WIDE = 16 * MT;
  constexpr int XB = NT >= 4 ? 2 : (8 / NT < BLOCKS ? 8 / NT : BLOCKS);
  constexpr int RB = CK * BITS / 8, WORDS = RB / 16, PITCH = RB + (BITS == 8 ? 32 : 16);
  constexpr int SIZE = MODE == 0 ? 2 : 1, SB = UNIT / GS * SIZE, SPITCH = ALIGNED ? PER * SB : PER * SB + 4;
  constexpr int ARRAYS = MODE == 0 ? 2 : 1, STAGE = WIDE * (PITCH + ARRAYS * SPITCH);
  constexpr int FETCHES = (WIDE * WORDS + 31) / 32, SCALED = (WIDE * ARRAYS + 31) / 32;
  const int K = w_shape[1] * 32 / BITS, UNITS = (K + UNIT - 1) / UNIT, TILES = (N + BN - 1) / BN;
  const int row_bytes = K * BITS / 8, scale_bytes = K / GS * SIZE;
  const int begin = int((long long)UNITS * kw / V) * UNIT;
  const int end = min(K, int((long long)UNITS * (kw + 1) / V) * UNIT);
  const int count = end > begin ? (end - begin + CK - 1) / CK : 0;
  char* own = reinterpret_cast<char*>(ring) + warp * DEPTH * STAGE;
  const char* packed = reinterpret_cast<const char*>(w);
  int coming = tile, ahead = 0, slot = 0, here = 0, from_row[FETCHES], scale_row[SCALED];
  auto aim = [&]() {
    #pragma unroll
    for (int j = 0; j < FETCHES; j++) from_row[j] = line_of(coming, nw * WIDE + (lane + 32 * j) / WORDS % WIDE);
    #pragma unroll
    for (int j = 0; j < SCALED; j++) scale_row[j] = line_of(coming, nw * WIDE + (lane + 32 * j) % WIDE);
  };
  aim();
  auto fetch = [&]() {
    if (coming < TILES && ahead < count) {
      const int k0 = begin + ahead * CK;
      char* to = own + slot * STAGE;
      #pragma unroll
      for (int j = 0; j < FETCHES; j++) {
        const int i = lane + 32 * j, at = k0 / 8 * BITS + i % WORDS * 16;
        const bool inside = at < row_bytes;
        if (WIDE * WORDS % 32 == 0 || i < WIDE * WORDS)
          mill_fetch_part<16>(to + i / WORDS * PITCH + i % WORDS * 16,
              packed + (size_t)from_row[j] * row_bytes + (inside ? at : 0), inside ? 16 : 0);
      }
      char* first_scale = to + WIDE * PITCH;
      #pragma unroll
      for (int j = 0; j < SCALED; j++) {
        const int i = lane + 32 * j;
        if (WIDE * ARRAYS % 32 != 0 && i >= WIDE * ARRAYS) break;
        const char* from = reinterpret_cast<const char*>(ALL_SCALES);
        const size_t at = (size_t)scale_row[j] * scale_bytes + k0 / GS * SIZE;
        if constexpr (ALIGNED) {
          #pragma unroll
          for (int u = 0; u < PER; u++) {
            const bool inside = k0 + u * UNIT < K;
            mill_fetch_part<SB>(first_scale + i * SPITCH + u * SB, from + at + (inside ? u * SB : 0), inside ? SB : 0);
          }
        } else {
          // From the word before, and not beyond the last.
          const size_t last = (size_t)N * scale_bytes;
          #pragma unroll
          for (int u = 0; u < SPITCH; u += 4) {
            const size_t word = (at & ~(size_t)3) + u;
            const int valid = word >= last ? 0 : last - word < 4 ? (int)(last - word) : 4;
            mill_fetch_part<4>(first_scale + i * SPITCH + u, from + (valid ? word : 0), valid);
          }
        }
      }
      if (++ahead == count) {
        ahead = 0;
        coming += gridDim.x;
        aim();
      }
    }
    slot = slot + 1 == DEPTH ? 0 : slot + 1;
    mill_commit();
  };
  #pragma unroll
  for (int c = 0; c < DEPTH - 1; c++) fetch();
  // The rows come from the cache: the next blocks' are on their way, after the last one's the first one's again.
  uint4 b[XB][NT];
  const T* xp[NT];
  #pragma unroll
  for (int n = 0; n < NT; n++) xp[n] = x + (size_t)min(n * 8 + g, R - 1) * K + begin + t * 8;
  auto read = [&](int at, uint4* to) {
    at = at < count * CK ? at : at - count * CK;
    #pragma unroll
    for (int n = 0; n < NT; n++)
      if (begin + at < end) to[n] = *reinterpret_cast<const uint4*>(xp[n] + at);
  };
  #pragma unroll
  for (int block = 0; block < XB - 1; block++) read(block * 32, b[block]);
  float* totals = reinterpret_cast<float*>(reinterpret_cast<char*>(ring) + NW * KW * DEPTH * STAGE);
"""

PACKED_PRODUCT = """
  float acc[MT][NT][4] = {};
#if NORM
  float squares[NT][2] = {};
#endif
  #pragma unroll 1
  for (int stage = 0; stage < count; stage++) {
    mill_wait<DEPTH - 2>();
    __syncwarp();  // what all lanes fetched is there, and what they read before may be overwritten
    fetch();
    const char* at = own + here * STAGE;
    here = here + 1 == DEPTH ? 0 : here + 1;
    const int k0 = begin + stage * CK;
    unsigned scale[MT][2], zero[MT][2];
    #pragma unroll XB
    for (int block = 0; block < BLOCKS; block++) {
      read(stage * CK + (block + XB - 1) * 32, b[(block + XB - 1) % XB]);
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
          row[n] = mill_scaled(row[n], by);
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
              if constexpr (!ALIGNED) mine += ((size_t)line(nw * WIDE + i) * scale_bytes + k0 / GS * SIZE) & 3;
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
