"""The CUDA source of decode attention that all slabs share: `decode_attention` assembles and launches it.

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
