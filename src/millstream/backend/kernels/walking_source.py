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
