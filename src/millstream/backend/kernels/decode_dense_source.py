"""Decode attention over slabs of plain numbers: what stands between the parts of `decode_source`."""

from __future__ import annotations

# The new tokens are written by this block, and read from where they come from: nobody else touches their columns. MLX
# knows nothing of this write: it relies on steps being evaluated one by one, so that their launches follow each other.
WRITE = """
  T* const slab_k = (T*)where.at[0] + begin * D;
  T* const slab_v = (T*)where.at[1] + begin * D;
  const T* const fresh_k = new_k + ((size_t)row * Q * heads + head) * D;
  const T* const fresh_v = new_v + ((size_t)row * Q * heads + head) * D;
  const int apart_fresh = heads * D;
  auto write = [&]() {
    constexpr int E = 16 / sizeof(T), PIECES = D / E;
    if (live && chunk == 0) {
      #pragma unroll 1
      for (int i = threadIdx.x; i < Q * 2 * PIECES; i += THREADS) {
        const int n = i / (2 * PIECES), e = i % PIECES * E, column = column_of(n);
        const bool value = i / PIECES % 2;
        if (first <= column && column < stop)
          *(uint4*)((value ? slab_v : slab_k) + (unsigned)column * D + e) =
            *(const uint4*)((value ? fresh_v : fresh_k) + n * apart_fresh + e);
      }
    }
  };
  // Columns beyond the last one stand for it, and are not seen.
  auto source = [&](const T* there, const T* fresh, int column) -> const T* {
    column = min(column, beyond - 1);
    int n = column - fresh_column;
    n += n < 0 ? around : 0;
    return (unsigned)n < Q ? fresh + n * apart_fresh : there + (unsigned)column * D;
  };
"""

QUERY = """
  constexpr int KS = D / 32;
  // A column of the mma without a query takes another's: nobody reads what becomes of it.
  uint4 query[(GQ + 7) / 8][KS];
  #pragma unroll
  for (int n = 0; n < (GQ + 7) / 8; n++) {
    const long long from = max(query_at(min(n * 8 + lane / 4, GQ - 1)), 0ll) * D + lane % 4 * 8;
    #pragma unroll
    for (int i = 0; i < KS; i++) {
      const int4 read = mill_four(q + from + i * 32);
      query[n][i] = make_uint4(read.x, read.y, read.z, read.w);
    }
  }
"""

# A thread reads only what it has fetched itself, so a place is free for the next tile as soon as it is read: there is
# no other barrier than the thread's own. Turns before 0 only fetch: so the code of fetching stands here once. The less
# code, the sooner a block is through it: most blocks run it from begin to end only once.
LOOP = """
  constexpr int VE = D % 64 ? 4 : 8, VU = D / (8 * VE), SLOTS = D / 16, STAGE = W * 2 * SLOTS * 32;
  const int mine = tiles > warp ? (tiles - warp + W - 1) / W : 0;
  int stage = 0;
  #pragma unroll 1
  for (int turns = -DEPTH; turns < mine; turns++) {
    // Of a tile each thread has SLOTS times 16 bytes of keys, then as many of values.
    uint4* const at_k = ring + stage * STAGE + warp * 2 * SLOTS * 32 + lane;
    uint4* const at_v = at_k + SLOTS * 32;
    const int from = first + (warp + turns * W) * 16, later = from + DEPTH * W * 16;
    const bool more = turns + DEPTH < mine;
    float s[NT][4] = {};
    if (turns >= 0) {
      mill_wait<2 * DEPTH - 1>();
      float other[NT][4] = {};
      #pragma unroll
      for (int i = 0; i < KS; i++) {
        const uint4 one = at_k[i * 32], two = at_k[(KS + i) * 32];
        #pragma unroll
        for (int n = 0; n < NT; n++) {
          mill_mma(s[n], one.x, two.x, one.y, two.y, query[n][i].x, query[n][i].y);
          mill_mma(other[n], one.z, two.z, one.w, two.w, query[n][i].z, query[n][i].w);
        }
      }
      #pragma unroll
      for (int n = 0; n < NT; n++)
        #pragma unroll
        for (int c = 0; c < 4; c++) s[n][c] += other[n][c];
    }
    if (more) {
      #pragma unroll
      for (int h = 0; h < 2; h++) {
        const T* keys = source(slab_k, fresh_k, later + h * 8 + g) + t * 8;
        #pragma unroll
        for (int i = 0; i < KS; i++) mill_fetch(at_k + (h * KS + i) * 32, keys + i * 32);
      }
    }
    mill_commit();
    if (turns >= 0) {
      float keep[NT][2];
      soften(from, s, keep);
      unsigned weight[NT][2];
      #pragma unroll
      for (int n = 0; n < NT; n++)
        #pragma unroll
        for (int h = 0; h < 2; h++) weight[n][h] = mill_transpose(mill_pack(s[n][h * 2], s[n][h * 2 + 1]));
      mill_wait<2 * DEPTH - 1>();
      #pragma unroll
      for (int u = 0; u < VU; u++) {
        unsigned v[4][4];
        #pragma unroll
        for (int p = 0; p < 4; p++) {
          if constexpr (VE == 8) {
            const uint4 read = at_v[(p * VU + u) * 32];
            v[p][0] = read.x, v[p][1] = read.y, v[p][2] = read.z, v[p][3] = read.w;
          } else {
            const uint2 read = ((const uint2*)(at_v - lane))[(p * VU + u) * 32 + lane];
            v[p][0] = read.x, v[p][1] = read.y;
          }
        }
        #pragma unroll
        for (int j = 0; j < VE / 2; j++) {
          const unsigned a0 = __byte_perm(v[0][j], v[1][j], 0x5410), a1 = __byte_perm(v[0][j], v[1][j], 0x7632);
          const unsigned a2 = __byte_perm(v[2][j], v[3][j], 0x5410), a3 = __byte_perm(v[2][j], v[3][j], 0x7632);
          #pragma unroll
          for (int n = 0; n < NT; n++) mill_mma(o[u * (VE / 2) + j][n], a0, a1, a2, a3, weight[n][0], weight[n][1]);
        }
      }
    }
    if (more) {
      #pragma unroll
      for (int p = 0; p < 4; p++) {
        const T* values = source(slab_v, fresh_v, later + p / 2 * 8 + t * 2 + p % 2) + g * VE;
        #pragma unroll
        for (int u = 0; u < VU; u++) {
          if constexpr (VE == 8) mill_fetch(at_v + (p * VU + u) * 32, values + u * 64);
          else mill_fetch_few<8>((uint2*)(at_v - lane) + (p * VU + u) * 32 + lane, values + u * 32);
        }
      }
    }
    mill_commit();
    if (turns == -1) write();
    stage = stage + 1 == DEPTH ? 0 : stage + 1;
  }
"""

# For types and sizes that the mma does not take: each warp takes every W-th key, two at a time.
SCALAR_LOOP = """
  write();
  constexpr int E = D / 32;
  float query[GQ][E], best[GQ], total[GQ], sum[GQ][E];
  #pragma unroll
  for (int j = 0; j < GQ; j++) {
    best[j] = NONE;
    total[j] = 0.f;
    #pragma unroll
    for (int e = 0; e < E; e++) {
      const long long from = query_at(j);
      query[j][e] = from >= 0 ? float(q[from * D + lane * E + e]) : 0.f;
      sum[j][e] = 0.f;
    }
  }
  for (int column = first + warp; column < beyond; column += 2 * W) {
    const bool two = column + W < beyond;
    const T* from_k[2] = {source(slab_k, fresh_k, column) + lane * E, source(slab_k, fresh_k, column + W) + lane * E};
    const T* from_v[2] = {source(slab_v, fresh_v, column) + lane * E, source(slab_v, fresh_v, column + W) + lane * E};
    float k[2][E], v[2][E];
    #pragma unroll
    for (int e = 0; e < E; e++) {
      k[0][e] = float(from_k[0][e]);
      k[1][e] = float(from_k[1][e]);
      v[0][e] = float(from_v[0][e]);
      v[1][e] = float(from_v[1][e]);
    }
    #pragma unroll
    for (int j = 0; j < GQ; j++) {
      float s[2] = {0.f, 0.f};
      #pragma unroll
      for (int e = 0; e < E; e++) {
        s[0] += query[j][e] * k[0][e];
        s[1] += query[j][e] * k[1][e];
      }
      #pragma unroll
      for (int x = 16; x > 0; x /= 2) {
        s[0] += __shfl_xor_sync(0xffffffff, s[0], x);
        s[1] += __shfl_xor_sync(0xffffffff, s[1], x);
      }
      s[0] = seen(column, j) ? score(s[0]) : NONE;
      s[1] = two && seen(column + W, j) ? score(s[1]) : NONE;
      const float top = fmaxf(best[j], fmaxf(s[0], s[1])), level = top > -1e29f ? top : 0.f;
      const float keep = mill_power(best[j] - top), p = mill_power(s[0] - level), r = mill_power(s[1] - level);
      best[j] = top;
      total[j] = total[j] * keep + p + r;
      #pragma unroll
      for (int e = 0; e < E; e++) sum[j][e] = sum[j][e] * keep + p * v[0][e] + r * v[1][e];
    }
  }
  constexpr int LINE = D;
  float* const all_sum = (float*)ring;
  float* const all_best = all_sum + W * GQ * LINE;
  float* const all_total = all_best + W * GQ;
  #pragma unroll
  for (int j = 0; j < GQ; j++) {
    if (lane == 0) {
      all_best[warp * GQ + j] = best[j];
      all_total[warp * GQ + j] = total[j];
    }
    #pragma unroll
    for (int e = 0; e < E; e++) all_sum[(warp * GQ + j) * LINE + lane * E + e] = sum[j][e];
  }
  __syncthreads();
"""
