"""The CUDA source of decode attention: `decode_attention` assembles and launches it.

A block takes one work item and one key-value head, with the queries of the group: GQ of them, which are all heads of
the group for QC of the row's Q tokens. Each of its W warps takes every W-th tile of 16 keys, with a running softmax of
its own; the warps are joined in shared memory, the items of a row by the last block that is done.

Queries, new keys and values and the output are those of a flat pass: token j of row n is row n * Q + j of them.

Keys are the rows of a tile and queries its columns: S' = K Q', then O' = V' P', by mma m16n8k16, so up to 8 queries
cost what one does. A thread fetches exactly the bytes that it feeds to its own mma: no two threads wait for each other.
For the keys that works because the order of a head's elements may be any, if it is the same on both sides; for the
values, because a thread takes 8 neighbouring elements of four keys and calls them rows of 4 different tiles.
"""

from __future__ import annotations

HEADER = """
#undef __global__
#define __global__ __attribute__((global)) __attribute__((launch_bounds(THREADS, BLOCKS)))
__device__ __forceinline__ void mill_fetch(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;"
    :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
template <int BYTES> __device__ __forceinline__ void mill_fetch_few(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2;"
    :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "n"(BYTES) : "memory");
}
__device__ __forceinline__ void mill_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void mill_wait() {
  asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory");
}
__device__ __forceinline__ void mill_mma(
    float* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.KIND.KIND.f32 "
    "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
    : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ unsigned mill_transpose(unsigned pair) {
  unsigned r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(pair));
  return r;
}
__device__ __forceinline__ unsigned mill_pack(float low, float high) {
  unsigned r;
  asm("cvt.rn.KINDx2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ float mill_power(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
__device__ __forceinline__ int4 mill_four(const void* from) {
  int4 r;
  asm volatile("ld.global.nc.v4.s32 {%0,%1,%2,%3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(from));
  return r;
}
__device__ __forceinline__ unsigned mill_small(unsigned pair) {
  unsigned r;
  asm("sub.f16x2 %0, %1, %2;" : "=r"(r) : "r"(pair), "r"(0x64006400u));
  return r;
}
"""
"""MLX writes a kernel's head: `__global__` is the only place at which it can be told how many registers it may have.
`mill_transpose`: of 8 x 8 halves, a pair of a row in each thread. `mill_power`: of two. `mill_small`: less 1,024
each, which leaves an integer that was put into the low bits of 1,024."""

# `number`: the number of a column's token, from column 0 of a slot that never wraps on. The row's new tokens have the
# numbers from `end` to `newest`. Scores are in units of log2.
BEGIN = """
  constexpr int THREADS = W * 32, PARTS = BITS ? 6 : 2;
  constexpr float LOG2E = 1.4426950408889634f, NONE = -1e30f;
  // The same number in all threads of a warp, which the compiler knows of what comes from one of them.
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int head = blockIdx.y, heads = new_k_shape[1];
  // What a block waits for before its first key counts. So: first all of the item and the layer's number, together;
  // then all that these lead to; then keys and values.
  const int4* item = (const int4*)items + (size_t)blockIdx.x * 3;
  const int4 one = mill_four(item), two = mill_four(item + 1), three = mill_four(item + 2);
  const int layer_number = layer[0];
  const int row = one.x, slab = one.y, capacity = one.w, first = two.x, stop = two.y, live = two.w, window = three.x;
  // Only the first can be: but who asks for all has read all, and the compiler puts no read off until after this.
  if ((row | stop | three.z | layer_number) < 0) return;
  constexpr int SHARE = GQ / QC;
  const int chunk = QC < Q ? blockIdx.z : 0;
  // Where a query of this block stands among all queries; -1 if there is none.
  auto query_at = [&](int query) -> long long {
    const int token = chunk * QC + query % QC;
    const long long flat = (long long)row * Q + token;
    return token < Q && flat < q_shape[0] ? (flat * heads + head) * SHARE + query / QC : -1;
  };
  if (slab < 0) {
    // A row without tokens: nobody reads it, but it must be a number.
    for (int i = threadIdx.x; i < GQ * D; i += THREADS) {
      const long long at = query_at(i / D);
      if (at >= 0) out[at * D + i % D] = T(0.f);
    }
    return;
  }
  const long long* base =
    (const long long*)addresses + ((size_t)slab * addresses_shape[1] + layer_number) * PARTS;
  union { int4 words[PARTS / 2]; long long at[PARTS]; } where;
  #pragma unroll
  for (int i = 0; i < PARTS / 2; i++) where.words[i] = mill_four(base + i * 2);
  const int length = lengths[row];
"""

# Waits for the row's length: what does not need it stands before.
PLACE = """
  const size_t begin = ((size_t)one.z * heads + head) * capacity;
  const int end = live ? length - two.z : 0x3fffffff, newest = end + Q - 1;
  // Of a ring: the number of the token in column 0 in its newest turn, and the column of the first new token.
  int turn = 0, fresh_column = end;
  const int around = live && window ? capacity : 0;
  if (around) {
    turn = end / capacity * capacity;
    fresh_column = end - turn;
    turn += newest - turn >= capacity ? capacity : 0;
  }
  const int beyond = min(stop, newest + 1);
  int parts = three.z;
  if (three.w) {
    // Parts that the row has not reached yet are not waited for.
    if (first > newest) return;
    parts = min(parts, newest / three.w + 1);
  }
  auto number = [&](int column) { return column + turn - (column + turn > newest ? capacity : 0); };
  auto column_of = [&](int fresh) {
    const int column = fresh_column + fresh;
    return column - (around && column >= around ? around : 0);
  };
  auto seen = [&](int column, int query) {
    const int at = number(column), own = end + chunk * QC + query % QC;
    return column < beyond && at <= own && (!window || at > own - window);
  };
  const bool plain = Q == 1 && !window;
  auto score = [&](float product) {
    product *= __int_as_float(SCALE);
    if constexpr (CAP != 0) {
      const float cap = __int_as_float(CAP), power = mill_power(2.f * LOG2E / cap * product);
      return cap * LOG2E * (1.f - 2.f / (power + 1.f));
    }
    return product * LOG2E;
  };
  extern __shared__ uint4 ring[];
"""

# The new tokens are written by this block, and read from where they come from: nobody else touches their columns. MLX
# knows nothing of this write: it relies on steps being evaluated one by one, so that their launches follow each other.
DENSE_WRITE = """
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

# What both tile loops have: the state of a warp, and the softmax of the scores of one tile. A thread has the scores of
# keys g and g + 8 with queries 2 t and 2 t + 1 of each column tile: `s[n][c]` is key g + c / 2 * 8, query 2 t + c % 2.
TILES = """
  constexpr int NT = (GQ + 7) / 8, OT = D / 16;
  const int g = lane / 4, t = lane % 4;
  const int tiles = beyond > first ? (beyond - first + 15) / 16 : 0;
  float best[NT][2], total[NT][2], o[OT][NT][4];
  #pragma unroll
  for (int n = 0; n < NT; n++) {
    best[n][0] = best[n][1] = NONE;
    total[n][0] = total[n][1] = 0.f;
    #pragma unroll
    for (int j = 0; j < OT; j++) o[j][n][0] = o[j][n][1] = o[j][n][2] = o[j][n][3] = 0.f;
  }
  auto soften = [&](int from, float (*s)[4], float (*keep)[2]) {
    const bool whole = plain && from + 16 <= beyond;
    #pragma unroll
    for (int n = 0; n < NT; n++) {
      #pragma unroll
      for (int c = 0; c < 4; c++) {
        s[n][c] = score(s[n][c]);
        if (!whole && !seen(from + g + c / 2 * 8, n * 8 + t * 2 + c % 2)) s[n][c] = NONE;
      }
      #pragma unroll
      for (int r = 0; r < 2; r++) {
        float top = fmaxf(s[n][r], s[n][r + 2]);
        #pragma unroll
        for (int x = 4; x < 32; x *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, x));
        top = fmaxf(top, best[n][r]);
        keep[n][r] = mill_power(best[n][r] - top);
        best[n][r] = top;
        // A query that has seen no key yet: all of its scores are the same floor, and must weigh nothing.
        const float level = top > -1e29f ? top : 0.f;
        s[n][r] = mill_power(s[n][r] - level);
        s[n][r + 2] = mill_power(s[n][r + 2] - level);
        total[n][r] = total[n][r] * keep[n][r] + s[n][r] + s[n][r + 2];
      }
    }
    bool same = true;
    #pragma unroll
    for (int n = 0; n < NT; n++) same = same && keep[n][0] == 1.f && keep[n][1] == 1.f;
    if (!__all_sync(0xffffffff, same)) {
      #pragma unroll
      for (int n = 0; n < NT; n++)
        #pragma unroll
        for (int j = 0; j < OT; j++)
          #pragma unroll
          for (int c = 0; c < 4; c++) o[j][n][c] *= keep[n][c % 2];
    }
  };
"""

DENSE_QUERY = """
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
DENSE_LOOP = """
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

# MLX's affine form: a number is scale * code + bias. The codes go through the mma as they are, scales and biases are
# applied to sums: to the scores of a key, and to the weights before they meet the values. Codes are exact in half
# precision, which the mma has whatever the type of the model is. VFACTOR keeps weights away from its smallest numbers.
PACKED_QUERY = """
  constexpr int NG = D / 64, CODES = D * BITS / 8;
  unsigned query[(GQ + 7) / 8][NG][4][2];
  float level[(GQ + 7) / 8][NG][2];
  #pragma unroll
  for (int n = 0; n < (GQ + 7) / 8; n++) {
    const long long from = max(query_at(min(n * 8 + lane / 4, GQ - 1)), 0ll) * D + lane % 4 * 16;
    #pragma unroll
    for (int u = 0; u < NG; u++) {
      union { int4 words[2]; T at[16]; } read = {{mill_four(q + from + u * 64), mill_four(q + from + u * 64 + 8)}};
      float e[16], sum = 0.f;
      #pragma unroll
      for (int i = 0; i < 16; i++) sum += e[i] = float(read.at[i]);
      #pragma unroll
      for (int i = 0; i < 4; i++) {
        // In the order in which the codes of keys are unpacked.
        const int a = BITS == 8 ? i * 4 : i / 2 * 8 + i % 2 * 2, b = BITS == 8 ? a + 1 : a + 4;
        const int c = BITS == 8 ? a + 2 : a + 1, d = BITS == 8 ? a + 3 : a + 5;
        query[n][u][i][0] = mill_pack(e[a], e[b]);
        query[n][u][i][1] = mill_pack(e[c], e[d]);
      }
      sum += __shfl_xor_sync(0xffffffff, sum, 1);
      sum += __shfl_xor_sync(0xffffffff, sum, 2);
      #pragma unroll
      for (int r = 0; r < 2; r++) level[n][u][r] = __shfl_sync(0xffffffff, sum, (lane % 4 * 2 + r) * 4);
    }
  }
"""

# New tokens are packed while the others are on their way. They go to the slab, and to shared memory, from where the
# tiles take them.
PACKED_WRITE = """
  constexpr float VFACTOR = 256.f;
  // A thread's keys: 16 elements of every group of 64. Its values: 8 elements of every group, of four keys.
  constexpr int KB = 2 * BITS, VB = BITS, KSLOT = 2 * NG * KB * 32, VSLOT = 4 * NG * VB * 32, SSLOT = 2 * NG * 4 * 32;
  constexpr int STAGE = KSLOT + VSLOT + SSLOT, FRESH = CODES + NG * 4;
  unsigned char* const codes_k = (unsigned char*)where.at[0] + begin * CODES;
  unsigned char* const codes_v = (unsigned char*)where.at[3] + begin * CODES;
  // Of every new token, its key and its value: codes, scales, biases.
  char* const fresh_area = (char*)ring + DEPTH * W * STAGE;
  // One warp packs 64 elements, as mx.quantize does on CUDA, step by step.
  auto write = [&]() {
    #pragma unroll 1
    for (int i = warp; i < Q * 2 * NG && live; i += W) {
      const int n = i / (2 * NG), value = i / NG % 2, u = i % NG, column = column_of(n);
      if (column < first || column >= stop) continue;
      const T* from = (value ? new_v : new_k) + (((size_t)row * Q + n) * heads + head) * D + u * 64 + lane * 2;
      const float one = float(from[0]), two = float(from[1]);
      float low = fminf(one, two), high = fmaxf(0.f, fmaxf(one, two));
      #pragma unroll
      for (int x = 16; x > 0; x /= 2) {
        low = fminf(low, __shfl_xor_sync(0xffffffff, low, x));
        high = fmaxf(high, __shfl_xor_sync(0xffffffff, high, x));
      }
      constexpr float BINS = (1 << BITS) - 1;
      float scale = fmaxf((high - low) / BINS, 1e-7f);
      const bool side = fabsf(low) > fabsf(high);
      scale = side ? scale : -scale;
      const float edge = side ? low : high, zero = roundf(edge / scale);
      const float bias = zero == 0.f ? 0.f : edge;
      scale = zero == 0.f ? scale : edge / zero;
      const unsigned a = (unsigned)fmaxf(0.f, fminf(roundf((one - bias) / scale), BINS));
      const unsigned b = (unsigned)fmaxf(0.f, fminf(roundf((two - bias) / scale), BINS));
      char* const here = fresh_area + (n * 2 + value) * FRESH;
      unsigned char* const there = (value ? codes_v : codes_k) + ((size_t)column * NG + u) * 8 * BITS;
      if constexpr (BITS == 8) {
        ((unsigned short*)(here + u * 64))[lane] = a | b << 8;
        if (chunk == 0) ((unsigned short*)there)[lane] = a | b << 8;
      } else {
        here[u * 32 + lane] = a | b << 4;
        if (chunk == 0) there[lane] = a | b << 4;
      }
      if (lane == 0) {
        const size_t at = (begin + column) * NG + u;
        ((T*)(here + CODES))[u] = T(scale);
        ((T*)(here + CODES))[NG + u] = T(bias);
        if (chunk == 0) {
          ((T*)(value ? where.at[4] : where.at[1]))[at] = T(scale);
          ((T*)(value ? where.at[5] : where.at[2]))[at] = T(bias);
        }
      }
    }
    __syncthreads();
  };
"""

PACKED_LOOP = """
  float shift[NT][NG][2];
  #pragma unroll
  for (int n = 0; n < NT; n++)
    #pragma unroll
    for (int u = 0; u < NG; u++) shift[n][u][0] = shift[n][u][1] = 0.f;
  // Scales and biases come in pairs: which of two is a column's.
  auto parity = [&](int column, int u) { return (((int)(begin & 1) + column) * NG + u) & 1; };
  auto fetch = [&](char* to, int from) {
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      const unsigned char* codes = codes_k + (unsigned)min(from + h * 8 + g, beyond - 1) * CODES + t * KB;
      #pragma unroll
      for (int u = 0; u < NG; u++) mill_fetch_few<KB>(to + ((h * NG + u) * 32 + lane) * KB, codes + u * 8 * BITS);
    }
    to += KSLOT;
    #pragma unroll
    for (int p = 0; p < 4; p++) {
      const unsigned char* codes = codes_v + (unsigned)min(from + p / 2 * 8 + t * 2 + p % 2, beyond - 1) * CODES;
      #pragma unroll
      for (int u = 0; u < NG; u++)
        mill_fetch_few<VB>(to + ((p * NG + u) * 32 + lane) * VB, codes + u * 8 * BITS + g * VB);
    }
    // t says which of the keys g and g + 8 and which of the two.
    to += VSLOT + lane * 4;
    const size_t index = (begin + min(from + t / 2 * 8 + g, beyond - 1)) * NG;
    const T* const of_keys = (const T*)(t % 2 ? where.at[2] : where.at[1]);
    const T* const of_values = (const T*)(t % 2 ? where.at[5] : where.at[4]);
    #pragma unroll
    for (int u = 0; u < NG; u++) {
      mill_fetch_few<4>(to + u * 32 * 4, of_keys + (index + u) / 2 * 2);
      mill_fetch_few<4>(to + (NG + u) * 32 * 4, of_values + (index + u) / 2 * 2);
    }
  };
  // Put new tokens into a tile: what was fetched in their place is not theirs yet.
  auto renew = [&](char* at, int from) {
    #pragma unroll 1
    for (int c = 0; c < 16; c++) {
      const int column = min(from + c, beyond - 1);
      int n = column - fresh_column;
      n += n < 0 ? around : 0;
      if ((unsigned)n >= Q) continue;
      const char* const key = fresh_area + n * 2 * FRESH;
      const char* const value = key + FRESH;
      #pragma unroll
      for (int i = lane; i < CODES / 4; i += 32) {
        const int u = i / (2 * BITS), byte = i % (2 * BITS) * 4;
        *(unsigned*)(at + ((c / 8 * NG + u) * 32 + c % 8 * 4) * KB + byte) = ((const unsigned*)key)[i];
        *(unsigned*)(at + KSLOT + (((c / 8 * 2 + c % 2) * NG + u) * 32 + byte / VB * 4 + c % 8 / 2) * VB + byte % VB) =
          ((const unsigned*)value)[i];
      }
      if (lane < 4 * NG) {
        const int kind = lane / NG, u = lane % NG, thread = c % 8 * 4 + c / 8 * 2 + kind % 2;
        ((T*)(at + KSLOT + VSLOT + ((kind / 2 * NG + u) * 32 + thread) * 4))[parity(column, u)] =
          ((const T*)((kind / 2 ? value : key) + CODES))[kind % 2 * NG + u];
      }
    }
  };
  auto unpack = [&](unsigned code, int i, int part) {  // of the keys: part 0 or 1 of mma i of a group
    if constexpr (BITS == 8) return mill_small(__byte_perm(code, 0x64646464u, part ? 0x4342 : 0x4140));
    return mill_small(((code >> (i % 2 * 8 + part * 4)) & 0x000f000fu) | 0x64006400u);
  };
  auto unpack_pair = [&](const unsigned* one, const unsigned* two, int d) {  // of the values: element d of two keys
    if constexpr (BITS == 8)
      return mill_small(
        (__byte_perm(one[d / 4], two[d / 4], d % 4 | (4 + d % 4) << 8) & 0x00ff00ffu) | 0x64006400u);
    const unsigned both = __byte_perm(one[0], two[0], d < 4 ? 0x5410 : 0x7632);
    return mill_small(((both >> (d % 4 * 4)) & 0x000f000fu) | 0x64006400u);
  };
  const int mine = tiles > warp ? (tiles - warp + W - 1) / W : 0;
  int stage = 0;
  #pragma unroll 1
  for (int turns = -DEPTH; turns < mine; turns++) {
    char* const at = (char*)ring + (stage * W + warp) * STAGE;
    const int from = first + (warp + turns * W) * 16;
    if (turns >= 0) {
      mill_wait<DEPTH - 1>();
      __syncwarp();
      // Whether the tile has new tokens: for a ring that turns in between it is only asked more often.
      if (live && (around || from + 16 > fresh_column)) {
        renew(at, from);
        __syncwarp();
      }
      // What belongs to keys g and g + 8: scale and bias of the keys, then of the values.
      auto factor = [&](int kind, int u, int h) {
        const int column = min(from + h * 8 + g, beyond - 1), thread = g * 4 + h * 2 + kind % 2;
        return float(((const T*)(at + KSLOT + VSLOT + ((kind / 2 * NG + u) * 32 + thread) * 4))[parity(column, u)]);
      };
      const char* const at_v = at + KSLOT;
      float s[NT][4] = {}, keep[NT][2];
      #pragma unroll
      for (int u = 0; u < NG; u++) {
        float sum[NT][4] = {};
        unsigned one[KB / 4], two[KB / 4];
        #pragma unroll
        for (int i = 0; i < KB / 8; i++) {
          const uint2 low = ((const uint2*)(at + (u * 32 + lane) * KB))[i];
          const uint2 high = ((const uint2*)(at + ((NG + u) * 32 + lane) * KB))[i];
          one[i * 2] = low.x, one[i * 2 + 1] = low.y;
          two[i * 2] = high.x, two[i * 2 + 1] = high.y;
        }
        #pragma unroll
        for (int i = 0; i < 4; i++) {
          const unsigned x = one[BITS == 8 ? i : i / 2], y = two[BITS == 8 ? i : i / 2];
          #pragma unroll
          for (int n = 0; n < NT; n++)
            mill_mma(sum[n], unpack(x, i, 0), unpack(y, i, 0), unpack(x, i, 1), unpack(y, i, 1), query[n][u][i][0],
              query[n][u][i][1]);
        }
        const float scale[2] = {factor(0, u, 0), factor(0, u, 1)}, bias[2] = {factor(1, u, 0), factor(1, u, 1)};
        #pragma unroll
        for (int n = 0; n < NT; n++)
          #pragma unroll
          for (int c = 0; c < 4; c++) s[n][c] += sum[n][c] * scale[c / 2] + bias[c / 2] * level[n][u][c % 2];
      }
      soften(from, s, keep);
      #pragma unroll
      for (int u = 0; u < NG; u++) {
        const float scale[2] = {factor(2, u, 0) * VFACTOR, factor(2, u, 1) * VFACTOR};
        const float bias[2] = {factor(3, u, 0), factor(3, u, 1)};
        unsigned weight[NT][2];
        #pragma unroll
        for (int n = 0; n < NT; n++) {
          #pragma unroll
          for (int r = 0; r < 2; r++)
            shift[n][u][r] = shift[n][u][r] * keep[n][r] + s[n][r] * bias[0] + s[n][r + 2] * bias[1];
          #pragma unroll
          for (int h = 0; h < 2; h++)
            weight[n][h] = mill_transpose(mill_pack(s[n][h * 2] * scale[h], s[n][h * 2 + 1] * scale[h]));
        }
        unsigned v[4][VB / 4];
        #pragma unroll
        for (int p = 0; p < 4; p++)
          #pragma unroll
          for (int i = 0; i < VB / 4; i++) v[p][i] = ((const unsigned*)(at_v + ((p * NG + u) * 32 + lane) * VB))[i];
        #pragma unroll
        for (int j = 0; j < 4; j++)
          #pragma unroll
          for (int n = 0; n < NT; n++)
            mill_mma(o[u * 4 + j][n], unpack_pair(v[0], v[1], j * 2), unpack_pair(v[0], v[1], j * 2 + 1),
              unpack_pair(v[2], v[3], j * 2), unpack_pair(v[2], v[3], j * 2 + 1), weight[n][0], weight[n][1]);
      }
      __syncwarp();
    }
    if (turns + DEPTH < mine) fetch(at, from + DEPTH * W * 16);
    mill_commit();
    if (turns == -1) write();
    stage = stage + 1 == DEPTH ? 0 : stage + 1;
  }
  #pragma unroll
  for (int n = 0; n < NT; n++)
    #pragma unroll
    for (int u = 0; u < NG; u++)
      #pragma unroll
      for (int r = 0; r < 2; r++) {
        float all = shift[n][u][r];
        #pragma unroll
        for (int x = 4; x < 32; x *= 2) all += __shfl_xor_sync(0xffffffff, all, x);
        #pragma unroll
        for (int j = 0; j < 4; j++) {
          o[u * 4 + j][n][r] = o[u * 4 + j][n][r] * (1.f / VFACTOR) + all;
          o[u * 4 + j][n][r + 2] = o[u * 4 + j][n][r + 2] * (1.f / VFACTOR) + all;
        }
      }
"""

# The results of a warp go to shared memory, where the ring of tiles was.
STORE_TILES = """
  constexpr int LINE = D + 4, WE = D % 64 ? 4 : 8;
  float* const all_sum = (float*)ring;
  float* const all_best = all_sum + W * GQ * LINE;
  float* const all_total = all_best + W * GQ;
  mill_wait<0>();
  __syncthreads();
  #pragma unroll
  for (int n = 0; n < NT; n++)
    #pragma unroll
    for (int r = 0; r < 2; r++) {
      const int query_number = n * 8 + t * 2 + r;
      #pragma unroll
      for (int x = 4; x < 32; x *= 2) total[n][r] += __shfl_xor_sync(0xffffffff, total[n][r], x);
      if (query_number < GQ) {
        if (g == 0) {
          all_best[warp * GQ + query_number] = best[n][r];
          all_total[warp * GQ + query_number] = total[n][r];
        }
        #pragma unroll
        for (int j = 0; j < OT; j++) {
          float* to = all_sum + (warp * GQ + query_number) * LINE + j / (WE / 2) * 8 * WE + g * WE + j % (WE / 2) * 2;
          to[0] = o[j][n][r];
          to[1] = o[j][n][r + 2];
        }
      }
    }
  __syncthreads();
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

# Joins the warps, and then the items of a row: the last block that is done reads what the others have written. All in
# one order, whatever the number of queries is: a query gets the same numbers in a pass of several tokens per row.
END = """
  struct alignas(4 * sizeof(T)) Four { T at[4]; };
  auto finish = [&](int i, float4 over, float under, float top) {
    const int query = i * 4 / D;
    const long long at = query_at(query);
    float factor = 1.f;
    if constexpr (SINKS) {
      const float sink = float(sinks[head * SHARE + query / QC]) * LOG2E, highest = fmaxf(top, sink);
      factor = mill_power(top - highest);
      under = under * factor + mill_power(sink - highest);
    }
    factor = under > 0.f ? factor / under : 0.f;
    if (at >= 0)
      *(Four*)(out + at * D + i * 4 % D) =
        Four{T(over.x * factor), T(over.y * factor), T(over.z * factor), T(over.w * factor)};
  };
  auto add = [](float4& to, float weight, float4 from) {
    to.x += weight * from.x;
    to.y += weight * from.y;
    to.z += weight * from.z;
    to.w += weight * from.w;
  };
  constexpr int RECORD = GQ * (D + 4), FOURS = GQ * D / 4;
  // Of every item and head: the sums of each query, then their weight and greatest score.
  const size_t first_record = (size_t)chunk * items_shape[0];
  float* const record = sums + (parts == 1 ? 0 : ((first_record + blockIdx.x) * heads + head) * RECORD);
  #pragma unroll 1
  for (int i = threadIdx.x; i < FOURS; i += THREADS) {
    const int query = i * 4 / D;
    float top = NONE, under = 0.f;
    float4 over = make_float4(0.f, 0.f, 0.f, 0.f);
    #pragma unroll
    for (int w = 0; w < W; w++) top = fmaxf(top, all_best[w * GQ + query]);
    #pragma unroll
    for (int w = 0; w < W; w++) {
      const float weight = mill_power(all_best[w * GQ + query] - top);
      add(over, weight, *(const float4*)(all_sum + (w * GQ + query) * LINE + i * 4 % D));
      under += weight * all_total[w * GQ + query];
    }
    if (parts == 1) {
      finish(i, over, under, top);
    } else {
      ((float4*)record)[i] = over;
      if (i * 4 % D == 0) *(float2*)(record + GQ * D + query * 2) = make_float2(under, top);
    }
  }
  if (parts == 1) return;
  int* const counter = const_cast<int*>(counters) + ((size_t)chunk * lengths_shape[0] + row) * heads + head;
  __shared__ int done;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    done = atomicAdd(counter, 1);
    __threadfence();
    if (done == parts - 1) *counter = 0;
  }
  __syncthreads();
  if (done != parts - 1) return;
  const size_t apart = (size_t)heads * RECORD;
  const float* const row_sums = sums + ((first_record + three.y) * heads + head) * RECORD;
  #pragma unroll 1
  for (int i = threadIdx.x; i < FOURS; i += THREADS) {
    const float* const ends = row_sums + GQ * D + i * 4 / D * 2;
    float top = NONE, under = 0.f;
    float4 over = make_float4(0.f, 0.f, 0.f, 0.f);
    #pragma unroll 4
    for (int p = 0; p < parts; p++) top = fmaxf(top, __ldcg(ends + p * apart + 1));
    #pragma unroll 4
    for (int p = 0; p < parts; p++) {
      const float2 end_of = __ldcg((const float2*)(ends + p * apart));
      const float weight = mill_power(end_of.y - top);
      under += weight * end_of.x;
      add(over, weight, __ldcg((const float4*)(row_sums + p * apart) + i));
    }
    finish(i, over, under, top);
  }
"""
