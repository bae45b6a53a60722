"""The CUDA source of the few-row matmuls: one body, and epilogues that dense, packed and expert kernels share.

A block takes BN = 16 * MT * NW rows of the weight and a row band of x. Its warps are NW side by side, each with its own
rows of the weight, times KW along K; S blocks share a tile and split K further. Both operands lie along K, so a thread
loads 16 bytes of each, and the same order of K on both sides feeds two mma m16n8k16.

How the sums are split depends on the weight alone: K is cut into S * KW slices, the sums of Q neighbouring slices are
added first, then all of them in order. Tiles of another shape with the same S * KW and Q give bitwise the same numbers,
so a row gets the same numbers whatever else is in the batch, and whatever width the batch is padded to.
"""

from __future__ import annotations

from millstream.backend.kernels import ptx

HEADER = """
__device__ __forceinline__ void mill_fetch(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
    :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void mill_stream(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;"
    :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void mill_warm(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" :: "l"(from));
}
__device__ __forceinline__ unsigned mill_times(unsigned one, unsigned two) {
  __nv_bfloat162 a, b;
  memcpy(&a, &one, 4);
  memcpy(&b, &two, 4);
  a = __hmul2(a, b);
  memcpy(&one, &a, 4);
  return one;
}
__device__ __forceinline__ float mill_squares(unsigned pair, float sum) {
  const float low = __uint_as_float(pair << 16), high = __uint_as_float(pair & 0xffff0000u);
  return fmaf(high, high, fmaf(low, low, sum));
}
__device__ __forceinline__ uint4 mill_scaled(uint4 row, uint4 scale) {
  return make_uint4(mill_times(row.x, scale.x), mill_times(row.y, scale.y), mill_times(row.z, scale.z),
      mill_times(row.w, scale.w));
}
// COUNT neighbours at once.
template <int COUNT, typename T> __device__ __forceinline__ void mill_put(T* to, const T* made) {
  if constexpr (COUNT == 8) {
    uint4 words;
    memcpy(&words, made, 16);
    *reinterpret_cast<uint4*>(to) = words;
  } else if constexpr (COUNT == 4) {
    uint2 words;
    memcpy(&words, made, 8);
    *reinterpret_cast<uint2*>(to) = words;
  } else
    *to = *made;
}
__device__ __forceinline__ float mill_total(float sum) { return sum; }
__device__ __forceinline__ float mill_total(const float* sums) { return sums[0] + sums[1]; }
__device__ __forceinline__ void mill_squares(uint4 row, float* sums) {
  const unsigned words[4] = {row.x, row.y, row.z, row.w};
  #pragma unroll
  for (int i = 0; i < 4; i++) {
    const float low = __uint_as_float(words[i] << 16), high = __uint_as_float(words[i] & 0xffff0000u);
    sums[0] = fmaf(low, low, sums[0]);
    sums[1] = fmaf(high, high, sums[1]);
  }
}
"""


def header(half: bool) -> str:
    """The helpers, for float16 or bfloat16."""
    return ptx.COPIES + ptx.mma(half) + HEADER


# Which block this is, and which warp. `line(l)` is the row of the weight that is column l of the block's tile,
# `line_of(tile, l)` that of any tile. Rows and columns beyond the end are computed from the last ones and not stored.
SETUP = """
  constexpr int NT = ROWS / 8, BN = 16 * MT * NW, LINE = BN + 1, TH = 32 * NW * KW, V = S * KW;
  const int N = w_shape[0], R = x_shape[0];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int kw = warp / NW, nw = warp % NW;
  const int bands = (R + ROWS - 1) / ROWS;
#if WALKS
  constexpr int band = 0;
  int tile = blockIdx.x;
#else
  const int band = blockIdx.x % bands, part = blockIdx.x / bands % S, tile = blockIdx.x / bands / S;
#endif
  const int first = band * ROWS, rows = min(ROWS, R - first);
  extern __shared__ uint4 ring[];
"""

# Small arrays are not in the cache: the weights of a whole model went through it since they were read last. A product
# that has one step of them on its way waits for each, so they are all sent for at once. Comes after the lines.
WARM = """
#if NORM
  for (int i = threadIdx.x * 64; i < norm_shape[0]; i += TH * 64) mill_warm(norm + i);
#endif
#if HEAD_NORM
  if (threadIdx.x * 64 < D) {
    mill_warm(q_norm + threadIdx.x * 64);
    mill_warm(k_norm + threadIdx.x * 64);
  }
#endif
#if ROPE
  if (threadIdx.x * 32 < periods_shape[0]) mill_warm(periods + threadIdx.x * 32);
  if (threadIdx.x == 0) {
    mill_warm(offset + first);
    mill_warm(offset + first + rows - 1);
  }
#endif
#if BIAS && !WALKS
  for (int l = threadIdx.x; l < BN; l += TH) mill_warm(bias + line(l));
#endif
#if defined(FACTOR) && !WALKS
  for (int row = threadIdx.x; row < rows; row += TH)
    for (int l = 0; l < BN; l += 32) mill_warm(r + (size_t)(first + row) * N + line(l));
#endif
"""

LINES = """
  auto line_of = [&](int tile, int l) { return min(tile * BN + l, N - 1); };
  auto line = [&](int l) { return line_of(tile, l); };
"""

HALVED_LINES = """
  constexpr int HALF = BN / 2;
  auto line_of = [&](int tile, int l) {
    return l < HALF ? min(tile * HALF + l, N / 2 - 1) : min(N / 2 + tile * HALF + l - HALF, N - 1);
  };
  auto line = [&](int l) { return line_of(tile, l); };
"""

# A tile is a part of both halves of a head, so that numbers which RoPE turns together are in one block.
PAIRED_LINES = """
  static_assert(D % BN == 0, "a head is whole tiles");
  constexpr int PAIRS = D / BN, PART = BN / 2;
  auto line_of = [&](int tile, int l) {
    return tile / PAIRS * D + l / PART * (D / 2) + tile % PAIRS * PART + l % PART;
  };
  auto line = [&](int l) { return line_of(tile, l); };
"""

# The sums of a dense weight's slice. The weight comes from far: DEPTH - 1 steps of 64 numbers of each of its rows are
# on their way, each a whole line of 128 bytes; a warp fetches its own rows. The rows of x come from the L2 cache:
# STAGED ones through shared memory, for all warps that need them, else each warp has the next step's on their way. In
# shared memory the halves of every other line are exchanged, so that eight lanes read from all banks.
PRODUCT = """
  const int K = w_shape[1], STEPS = K / 64;
  const int begin = int((long long)STEPS * (part * KW + kw) / V);
  const int count = int((long long)STEPS * (part * KW + kw + 1) / V) - begin;
  constexpr int STAGE = TH * MT * 4 + (STAGED ? KW * ROWS * 8 : 0), HELD = STAGED ? 1 : NT;
  float acc[MT][NT][4] = {};
  int lines[MT * 4];
  #pragma unroll
  for (int i = 0; i < MT * 4; i++) lines[i] = line(nw * MT * 16 + i * 4 + lane / 8);
  const T* wp = w + begin * 64 + lane % 8 * 8;
  const int own = warp * MT * 128, place = lane / 8 * 8 + (lane % 8 ^ lane / 8 % 2 * 4);
  auto fetch = [&](int step) {
    uint4* stage = ring + step % DEPTH * STAGE;
    if (step < count) {
      #pragma unroll
      for (int i = 0; i < MT * 4; i++)
        mill_stream(stage + own + i * 32 + place, wp + (size_t)lines[i] * K + step * 64);
      if (STAGED) {
        #pragma unroll
        for (int p = nw * 32 + lane; p < ROWS * 8; p += NW * 32)
          mill_fetch(stage + TH * MT * 4 + kw * ROWS * 8 + p / 8 * 8 + (p % 8 ^ p / 8 % 2 * 4),
              x + (size_t)min(first + p / 8, R - 1) * K + (begin + step) * 64 + p % 8 * 8);
      }
    }
    mill_commit();
  };
  #pragma unroll
  for (int c = 0; c < DEPTH - 1; c++) fetch(c);
  // Of x, and of the norm's weight, the next half of a step is on its way.
  uint4 next[HELD];
  const T* xp[HELD];
  #pragma unroll
  for (int n = 0; n < HELD; n++) xp[n] = x + (size_t)min(first + n * 8 + g, R - 1) * K + begin * 64 + t * 8;
  auto read = [&](int half) {
    if (!STAGED && half < 2 * count) {
      #pragma unroll
      for (int n = 0; n < HELD; n++) next[n] = *reinterpret_cast<const uint4*>(xp[n] + half * 32);
    }
  };
  read(0);
#if NORM
  float squares[NT][2] = {};
  const T* np = norm + begin * 64 + t * 8;
  uint4 scale = {};
  auto read_norm = [&](int half) {
    if (half < 2 * count) scale = *reinterpret_cast<const uint4*>(np + half * 32);
  };
  read_norm(0);
#endif
  const int LOOPS = STAGED ? (STEPS + V - 1) / V : count;
  #pragma unroll 1
  for (int c = 0; c < LOOPS; c++) {
    mill_wait<DEPTH - 2>();
    if (STAGED) __syncthreads(); else __syncwarp();
    fetch(c + DEPTH - 1);
    if (STAGED && c >= count) continue;
    const uint4* stage = ring + c % DEPTH * STAGE;
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      const int at = g * 8 + ((h ^ g % 2) * 4 + t);
      uint4 a[MT][2], b[NT];
      #pragma unroll
      for (int m = 0; m < MT; m++) {
        a[m][0] = stage[own + m * 128 + at];
        a[m][1] = stage[own + m * 128 + 64 + at];
      }
      #pragma unroll
      for (int n = 0; n < NT; n++) b[n] = STAGED ? stage[TH * MT * 4 + kw * ROWS * 8 + n * 64 + at] : next[n % HELD];
      read(2 * c + h + 1);
#if NORM
      const uint4 scaled = scale;
      read_norm(2 * c + h + 1);
      #pragma unroll
      for (int n = 0; n < NT; n++) {
        if (n % NW == nw) mill_squares(b[n], squares[n]);
        b[n] = mill_scaled(b[n], scaled);
      }
#endif
      // Products for the same sum are far from each other: each takes some 30 cycles.
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

# From here on `totals[row * LINE + column]` are the sums over all of K. They lie where the weight lay (behind it if
# blocks walk), a line a row of x, one float more: that is against bank conflicts, and holds the row's factor of the RMS
# norm.
SUM_WARPS = """
#if !WALKS
  mill_wait<0>();
  __syncthreads();
  float* totals = reinterpret_cast<float*>(ring);
#endif
  {
    float* mine = totals + kw * ROWS * LINE;
    #pragma unroll
    for (int m = 0; m < MT; m++)
      #pragma unroll
      for (int n = 0; n < NT; n++)
        #pragma unroll
        for (int c = 0; c < 4; c++)
          mine[(n * 8 + t * 2 + c % 2) * LINE + (nw * MT + m) * 16 + g + c / 2 * 8] = acc[m][n][c];
#if NORM
    #pragma unroll
    for (int n = 0; n < NT; n++) {
      if (n % NW == nw) {
        float sum = mill_total(squares[n]);
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (t == 0) mine[(n * 8 + g) * LINE + BN] = sum;
      }
    }
#else
    if (nw == 0) for (int n = lane; n < ROWS; n += 32) mine[n * LINE + BN] = 0.f;
#endif
  }
  __syncthreads();
  auto group = [&](int j, int i) {
    float sum = totals[j * Q * ROWS * LINE + i];
    #pragma unroll
    for (int q = 1; q < Q; q++) sum += totals[(j * Q + q) * ROWS * LINE + i];
    return sum;
  };
#if NORM
  auto finish = [&](int i, float sum) { totals[i] = i % LINE == BN ? rsqrtf(sum / K + EPS) : sum; };
#else
  auto finish = [&](int i, float sum) { totals[i] = sum; };
#endif
"""

WHOLE = """
  #pragma unroll 2
  for (int i = threadIdx.x; i < rows * LINE; i += TH) {
    float sum = group(0, i);
    #pragma unroll
    for (int j = 1; j < KW / Q; j++) sum += group(j, i);
    finish(i, sum);
  }
  __syncthreads();
"""

# S blocks have a part of K each. The one that comes last adds all parts, in their order.
SHARED = """
  {
    constexpr int GROUPS = KW / Q;
    const int shared_tile = tile * bands + band;
    float* all = partial + (size_t)shared_tile * S * GROUPS * ROWS * LINE;
    for (int i = threadIdx.x; i < rows * LINE; i += TH)
      #pragma unroll
      for (int j = 0; j < GROUPS; j++) __stcg(all + (part * GROUPS + j) * ROWS * LINE + i, group(j, i));
    __threadfence();
    __syncthreads();
    __shared__ unsigned come;
    unsigned* ticket = const_cast<unsigned*>(tickets) + shared_tile;
    if (threadIdx.x == 0) come = atomicAdd(ticket, 1u);
    __syncthreads();
    if (come != S - 1) return;
    if (threadIdx.x == 0) *ticket = 0u;
    __threadfence();
    #pragma unroll 4
    for (int i = threadIdx.x; i < rows * LINE; i += TH) {
      float sum = __ldcg(all + i);
      #pragma unroll
      for (int j = 1; j < S * GROUPS; j++) sum += __ldcg(all + j * ROWS * LINE + i);
      finish(i, sum);
    }
    __syncthreads();
  }
"""

# `sum(row, column)` is the product, rounded as it would be alone.
ROUND = """
  auto sum = [&](int row, int col) {
    float value = totals[row * LINE + col];
#if NORM
    value *= totals[row * LINE + BN];
#endif
#if BIAS
    value += float(bias[line(col)]);
#endif
    return float(T(value));
  };
"""

# Of more rows than a few, a thread takes eight neighbouring numbers of a row, 16 bytes, where the lines of the output
# allow it: one by one, with every load waited for, the last steps of 64 rows take longer than their product.
STORE = """
  if (ROWS > 8 && N % 8 == 0) {
    #pragma unroll 2
    for (int i = threadIdx.x; i < rows * (BN / 8); i += TH) {
      const int row = i / (BN / 8), col = i % (BN / 8) * 8, n = tile * BN + col;
      if (n < N) {
        T made[8];
        #pragma unroll
        for (int k = 0; k < 8; k++) made[k] = T(sum(row, col + k));
        mill_put<8>(out + (size_t)(first + row) * N + n, made);
      }
    }
  } else {
    #pragma unroll 2
    for (int i = threadIdx.x; i < rows * BN; i += TH) {
      const int row = i / BN, col = i % BN, n = tile * BN + col;
      if (n < N) out[(size_t)(first + row) * N + n] = T(sum(row, col));
    }
  }
"""

ADD = """
  if (ROWS > 8 && N % 8 == 0) {
    constexpr int LOADS = ROWS * BN / 8 / TH < 1 ? 1 : ROWS * BN / 8 / TH > 4 ? 4 : ROWS * BN / 8 / TH;
    #pragma unroll 1
    for (int from = threadIdx.x; from < rows * (BN / 8); from += LOADS * TH) {
      uint4 given[LOADS];
      #pragma unroll
      for (int j = 0; j < LOADS; j++) {
        const int i = from + j * TH, row = i / (BN / 8), n = tile * BN + i % (BN / 8) * 8;
        if (row < rows && n < N) given[j] = *reinterpret_cast<const uint4*>(r + (size_t)(first + row) * N + n);
      }
      #pragma unroll
      for (int j = 0; j < LOADS; j++) {
        const int i = from + j * TH, row = i / (BN / 8), col = i % (BN / 8) * 8, n = tile * BN + col;
        if (row < rows && n < N) {
          T made[8];
          memcpy(made, &given[j], 16);
          #pragma unroll
          for (int k = 0; k < 8; k++) made[k] = T(float(T(sum(row, col + k) * FACTOR)) + float(made[k]));
          mill_put<8>(out + (size_t)(first + row) * N + n, made);
        }
      }
    }
  } else {
    #pragma unroll 2
    for (int i = threadIdx.x; i < rows * BN; i += TH) {
      const int row = i / BN, col = i % BN, n = tile * BN + col;
      const size_t at = (size_t)(first + row) * N + n;
      if (n < N) out[at] = T(float(T(sum(row, col) * FACTOR)) + float(r[at]));
    }
  }
"""

GLU = """
  if (ROWS > 8 && N % 16 == 0 && HALF % 8 == 0) {
    #pragma unroll 1
    for (int i = threadIdx.x; i < rows * (HALF / 8); i += TH) {
      const int row = i / (HALF / 8), col = i % (HALF / 8) * 8, n = tile * HALF + col;
      if (n < N / 2) {
        T made[8];
        #pragma unroll
        for (int k = 0; k < 8; k++) {
          const float gate = sum(row, col + k), up = sum(row, col + k + HALF);
          made[k] = T(ACTIVATED);
        }
        mill_put<8>(out + (size_t)(first + row) * (N / 2) + n, made);
      }
    }
  } else {
    #pragma unroll 1
    for (int i = threadIdx.x; i < rows * HALF; i += TH) {
      const int row = i / HALF, col = i % HALF, n = tile * HALF + col;
      const float gate = sum(row, col), up = sum(row, col + HALF);
      if (n < N / 2) out[(size_t)(first + row) * (N / 2) + n] = T(ACTIVATED);
    }
  }
"""

ACTIVATED = {
    "silu": "float(T(gate / (1.f + __expf(-gate)))) * up",
    "gelu": "float(T(0.5f * gate * (1.f + erff(gate * 0.70710678f)))) * up",
    "gelu_tanh": "float(T(0.5f * gate * (1.f + tanhf(0.79788456f * (gate + 0.044715f * gate * gate * gate))))) * up",
    "clipped": "float(T(fminf(gate, 7.f) / (1.f + __expf(-1.702f * fminf(gate, 7.f)))))"
    " * (fminf(fmaxf(up, -7.f), 7.f) + 1.f)",
}

# A tile is a head. A warp has all of a row's head: first its norm, then RoPE of its first numbers.
QKV = """
  static_assert(BN == D, "a tile is a head");
#if ROPE
  // What a lane needs for every row, and of the next row, comes from far.
  const int half = tile < H + KV ? periods_shape[0] : 0;
  constexpr int TURNS = (D / 2 + 31) / 32;
  float rates[TURNS];
  #pragma unroll
  for (int i = 0; i < TURNS; i++) rates[i] = lane + i * 32 < half ? 1.f / periods[lane + i * 32] : 0.f;
  int next = warp < rows ? offset[first + warp] : 0;
#endif
  #pragma unroll 1
  for (int row = warp; row < rows; row += NW * KW) {
#if ROPE
    const float position = float(next);
    if (row + NW * KW < rows) next = offset[first + row + NW * KW];
#endif
    float* head = totals + row * LINE;
    float square = 0.f;
    for (int d = lane; d < D; d += 32) {
      const float value = sum(row, d);
      head[d] = value;
      square += value * value;
    }
#if HEAD_NORM
    if (tile < H + KV) {
      #pragma unroll
      for (int o = 16; o; o /= 2) square += __shfl_xor_sync(0xffffffffu, square, o);
      const float length = rsqrtf(square / D + (tile < H ? Q_EPS : K_EPS));
      for (int d = lane; d < D; d += 32)
        head[d] = float(T(float(T(head[d] * length)) * float(tile < H ? q_norm[d] : k_norm[d])));
    }
#endif
    __syncwarp();
    const size_t at = first + row;
    T* to = tile < H ? q + (at * H + tile) * D
        : tile < H + KV ? keys + (at * KV + tile - H) * D : values + (at * KV + tile - H - KV) * D;
#if ROPE
    #pragma unroll
    for (int i = 0; i < TURNS; i++) {
      const int d = lane + i * 32;
      if (d >= half) break;
      const float one = TURNED(head[d]), two = TURNED(head[d + half]);
      float sine, cosine;
      sincosf(position * rates[i], &sine, &cosine);
      to[d] = T(one * cosine - two * sine);
      to[d + half] = T(one * sine + two * cosine);
    }
    for (int d = 2 * half + lane; d < D; d += 32) to[d] = T(head[d]);
#else
    for (int d = lane; d < D; d += 32) to[d] = T(head[d]);
#endif
  }
"""

# The same for tiles of `PAIRED_LINES`, without norms of heads, if all of a head is turned. A thread takes EACH
# neighbouring numbers of both halves, so that their sines are computed beside each other.
QKV_PAIRS = """
  const int head = tile / PAIRS, begin_at = tile % PAIRS * PART;
  constexpr int EACH = ROWS > 8 && PART % 4 == 0 ? 4 : 1;
  #pragma unroll 1
  for (int i = threadIdx.x; i < rows * (PART / EACH); i += TH) {
    const int row = i / (PART / EACH), col = i % (PART / EACH) * EACH, d = begin_at + col;
    const size_t at = first + row;
    T low[EACH], high[EACH];
#if ROPE
    const float position = float(offset[at]);
#endif
    #pragma unroll
    for (int k = 0; k < EACH; k++) {
      float one = sum(row, col + k), two = sum(row, col + k + PART);
#if ROPE
      if (head < H + KV) {
        float sine, cosine;
        sincosf(position * (1.f / periods[d + k]), &sine, &cosine);
        one = TURNED(one);
        two = TURNED(two);
        const float turned = one * cosine - two * sine;
        two = one * sine + two * cosine;
        one = turned;
      }
#endif
      low[k] = T(one);
      high[k] = T(two);
    }
    T* to = head < H ? q + (at * H + head) * D
        : head < H + KV ? keys + (at * KV + head - H) * D : values + (at * KV + head - H - KV) * D;
    mill_put<EACH>(to + d, low);
    mill_put<EACH>(to + d + D / 2, high);
  }
"""
