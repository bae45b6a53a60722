"""The CUDA source of few-row matmuls with packed weights: what stands in place of `matmul_source.PRODUCT`.

A lane reads 32 neighbouring numbers of a row of the weight at once, straight into registers: a *unit* of 128 numbers is
four lanes, two rows of each of a warp's tiles are a lane's. It unpacks each number once (`unpack_cuda`) and multiplies
it with all rows of x. The order of K inside a unit is any, if it is the same on both sides.

K is cut into SLICES slices of whole units, whatever the shape of a block: each is summed by one warp in order, two
neighbours are added, then all pairs in order. So a row gets the same numbers at every width. The sums of squares of an
RMS norm come from the tensor cores too: the diagonal of x times itself.

FEW: for up to eight rows. Each warp has one slice of K; a block takes one tile after the other, and the next tile's
numbers are on their way while it adds its sums up.

MANY: for more rows. x is what most bytes are read of, so the warps of a block are side by side, go through K together
and share x in shared memory, where it lies as the tensor cores want it.
"""

from __future__ import annotations

HEADER = """
template <int WORDS> __device__ __forceinline__ void mill_words(const char* from, unsigned* to) {
  if constexpr (WORDS % 4 == 0) {
    #pragma unroll
    for (int i = 0; i < WORDS; i += 4)
      asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
        : "=r"(to[i]), "=r"(to[i + 1]), "=r"(to[i + 2]), "=r"(to[i + 3]) : "l"(from + i * 4));
  } else if constexpr (WORDS % 2 == 0) {
    #pragma unroll
    for (int i = 0; i < WORDS; i += 2)
      asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v2.u32 {%0,%1}, [%2];"
        : "=r"(to[i]), "=r"(to[i + 1]) : "l"(from + i * 4));
  } else {
    #pragma unroll
    for (int i = 0; i < WORDS; i++)
      asm volatile("ld.global.nc.L1::no_allocate.L2::256B.u32 %0, [%1];" : "=r"(to[i]) : "l"(from + i * 4));
  }
}
__device__ __forceinline__ void mill_fetch_part(void* to, const void* from, int valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
    :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "r"(valid) : "memory");
}
"""

# A warp's rows of the weight, a unit of them in registers, and their products with a unit of x. Lanes beyond the end of
# K read its begin, and zeros of x.
UNITS = """
  constexpr int UNIT = 128, SLICES = 8, PER = GS < 32 ? 32 / GS : 1;
  const int K = w_shape[1] * 32 / BITS, COUNT = (K + UNIT - 1) / UNIT;
  const int row_bytes = K / 8 * BITS, row_scales = K / GS;
  const char* packed = reinterpret_cast<const char*>(w);
  struct Unit { unsigned words[BITS], scale[PER], zero[PER]; };
  using Raw = RAW_SCALE;
  const char* from_row[MT][2];
  int from_scale[MT][2];
  auto aim = [&](int at) {
    #pragma unroll
    for (int m = 0; m < MT; m++)
      #pragma unroll
      for (int h = 0; h < 2; h++) {
        const int row = line_of(at, (nw * MT + m) * 16 + h * 8 + g);
        from_row[m][h] = packed + (size_t)row * row_bytes + t * 4 * BITS;
        from_scale[m][h] = row * row_scales + t * 32 / GS;
      }
  };
  auto load = [&](int unit, Unit (*to)[2]) {
    int k = unit * UNIT;
    if (!ALIGNED && k + t * 32 >= K) k = -t * 32;
    #pragma unroll
    for (int m = 0; m < MT; m++)
      #pragma unroll
      for (int h = 0; h < 2; h++) {
        mill_words<BITS>(from_row[m][h] + k / 8 * BITS, to[m][h].words);
        const int at = from_scale[m][h] + k / GS;
        #pragma unroll
        for (int s = 0; s < PER; s++) {
          to[m][h].scale[s] = __ldg(reinterpret_cast<const Raw*>(scales) + at + s);
          to[m][h].zero[s] = __ldg(reinterpret_cast<const Raw*>(ZEROS) + at + s);
        }
      }
  };
  auto begin_of = [&](int slice) { return int((long long)COUNT * slice / SLICES); };
  float acc[MT][NT][4];
  auto clear = [&]() {
    #pragma unroll
    for (int m = 0; m < MT; m++)
      #pragma unroll
      for (int n = 0; n < NT; n++) acc[m][n][0] = acc[m][n][1] = acc[m][n][2] = acc[m][n][3] = 0.f;
  };
  // `row_of(block, n)`: eight numbers of x for this lane, in the order of the unpacked ones.
  auto multiply = [&](Unit (*unit)[2], auto&& row_of) {
    #pragma unroll
    for (int m = 0; m < MT; m++)
      #pragma unroll
      for (int h = 0; h < 2; h++)
        #pragma unroll
        for (int s = 0; s < PER; s++) {
          unit[m][h].scale[s] = mill_scale_of<MODE>(unit[m][h].scale[s]);
          if (MODE == 0) unit[m][h].zero[s] = mill_scale_of<MODE>(unit[m][h].zero[s]);
        }
    #pragma unroll
    for (int block = 0; block < 4; block++) {
      unsigned a[MT][2][4];
      #pragma unroll
      for (int m = 0; m < MT; m++)
        #pragma unroll
        for (int h = 0; h < 2; h++)
          mill_unpack_words<BITS, MODE>(unit[m][h].words, block, unit[m][h].scale[block * PER / 4],
              unit[m][h].zero[block * PER / 4], a[m][h]);
      #pragma unroll
      for (int n = 0; n < NT; n++) {
        const uint4 row = row_of(block, n);
        #pragma unroll
        for (int m = 0; m < MT; m++)
          mill_mma(acc[m][n], a[m][0][0], a[m][1][0], a[m][0][1], a[m][1][1], row.x, row.y);
        #pragma unroll
        for (int m = 0; m < MT; m++)
          mill_mma(acc[m][n], a[m][0][2], a[m][1][2], a[m][0][3], a[m][1][3], row.z, row.w);
      }
    }
  };
  // A lane's eight numbers of x as they are multiplied. Their squares are added to `diagonal`.
  auto prepared = [&](uint4 row, int k, float* diagonal) {
#if NORM
    mill_mma(diagonal, row.x, 0u, row.y, 0u, row.x, row.y);
    mill_mma(diagonal, row.z, 0u, row.w, 0u, row.z, row.w);
    row = mill_scaled(row, *reinterpret_cast<const uint4*>(norm + (ALIGNED || k < K ? k : 0)));
#endif
    return mill_as_packed<BITS>(row);
  };
  // Row g's sum of squares is one lane's; the others have zeros.
  auto square_of = [&](const float* diagonal) { return t != g / 2 ? 0.f : g % 2 ? diagonal[1] : diagonal[0]; };
"""

FEW_START = """
  constexpr int HELD = MT == 1 ? 4 : 2;
#if WALKS
  const int slice = kw, STRIDE = gridDim.x, TILES = (N + BN - 1) / BN;
#else
  const int slice = part * KW + kw, STRIDE = 1, TILES = tile + 1;
#endif
  const int begin = begin_of(slice), count = begin_of(slice + 1) - begin;
  Unit held[HELD][MT][2];
  int coming = tile;
  aim(coming);
  auto fetch = [&](int unit, Unit (*to)[2]) {
    if (unit < count && coming < TILES) load(begin + unit, to);
  };
  #pragma unroll
  for (int j = 0; j < HELD; j++) fetch(j, held[j]);
  // Of x the next unit is on its way: after the last one, the first again.
  uint4 next[4][NT];
  auto read = [&](int unit, int block) {
    const int k = (begin + unit) * UNIT + t * 32 + block * 8;
    #pragma unroll
    for (int n = 0; n < NT; n++)
      next[block][n] = ALIGNED || k < K
          ? *reinterpret_cast<const uint4*>(x + (size_t)min(first + n * 8 + g, R - 1) * K + k)
          : make_uint4(0u, 0u, 0u, 0u);
  };
  #pragma unroll
  for (int block = 0; block < 4; block++) if (count > 0) read(0, block);
#if WALKS
  float* totals = reinterpret_cast<float*>(ring);
#endif
"""

FEW_PRODUCT = """
  clear();
  float diagonal[NT][4] = {};
  #pragma unroll 1
  for (int at = 0; at < count; at += HELD) {
    const bool last = at + HELD >= count;
    if (last) {
      coming += STRIDE;
      aim(coming);
    }
    #pragma unroll
    for (int j = 0; j < HELD; j++) {
      const int unit = at + j;
      if (unit < count)
        multiply(held[j], [&](int block, int n) {
          const uint4 row = prepared(next[block][n], (begin + unit) * UNIT + t * 32 + block * 8, diagonal[n]);
          if (n == NT - 1) read(unit + 1 < count ? unit + 1 : 0, block);
          return row;
        });
      fetch(last ? j : unit + HELD, held[j]);
    }
  }
#if NORM
  float squares[NT];
  #pragma unroll
  for (int n = 0; n < NT; n++) squares[n] = square_of(diagonal[n]);
#endif
"""

# S blocks share a tile: all slices in one, two slices in each of four, or one in each of eight. A lane's sums stay its
# own: between slices, and in `partial`. From here on `totals` are as in `matmul_source.SUM_WARPS`.
MANY_PRODUCT = """
  constexpr int ROUND = 3, FRAGMENTS = 4 * NT * 32, SUMS = ROWS * LINE * 4;
  constexpr int AREA = (ROUND * FRAGMENTS * 16 > SUMS ? ROUND * FRAGMENTS * 16 : SUMS + 15) / 16 * 16;
  constexpr int HELD = 2, OWN = (NT + NW - 1) / NW, PARTS = MT * NT;
  const int first_slice = part * (SLICES / S), last_slice = first_slice + SLICES / S;
  const int from = begin_of(first_slice), to = begin_of(last_slice);
  float4* const run = reinterpret_cast<float4*>(reinterpret_cast<char*>(ring) + AREA) + threadIdx.x;
  auto place = [&](int unit, int block, int n) {
    return ring + (unit - from) % ROUND * FRAGMENTS + (block * NT + n) * 32 + lane;
  };
  auto bring = [&](int unit) {
    if (unit < to) {
      #pragma unroll
      for (int o = 0; o < OWN; o++) {
        const int n = o * NW + nw;
        if (NT % NW == 0 || n < NT) {
          #pragma unroll
          for (int block = 0; block < 4; block++) {
            const int k = unit * UNIT + t * 32 + block * 8;
            const bool inside = ALIGNED || k < K;
            mill_fetch_part(place(unit, block, n), x + (size_t)min(first + n * 8 + g, R - 1) * K + (inside ? k : 0),
                inside ? 16 : 0);
          }
        }
      }
    }
    mill_commit();
  };
  // What this lane brought, it turns into what is multiplied. `turning`: the slice whose squares are summed.
  int turning = first_slice;
  float diagonal[OWN][4] = {}, square_pair[OWN] = {}, square[OWN] = {};
  auto end_squares = [&](int until) {
    for (; turning < until; turning++) {
      #pragma unroll
      for (int o = 0; o < OWN; o++) {
        const float sum = square_of(diagonal[o]);
        if (S == SLICES) square[o] = sum;
        else if (turning % 2 == 0) square_pair[o] = sum;
        else square[o] += square_pair[o] + sum;
        diagonal[o][0] = diagonal[o][1] = diagonal[o][2] = diagonal[o][3] = 0.f;
      }
    }
  };
  auto turn = [&](int unit) {
    if (unit >= to || (!NORM && BITS != 4)) return;
    if (NORM) {
      int slice = turning;
      while (unit >= begin_of(slice + 1)) slice++;
      end_squares(slice);
    }
    #pragma unroll
    for (int o = 0; o < OWN; o++) {
      const int n = o * NW + nw;
      if (NT % NW == 0 || n < NT) {
        #pragma unroll
        for (int block = 0; block < 4; block++) {
          uint4* at = place(unit, block, n);
          *at = prepared(*at, unit * UNIT + t * 32 + block * 8, diagonal[o]);
        }
      }
    }
  };
  Unit held[HELD][MT][2];
  aim(tile);
  bring(from);
  bring(from + 1);
  #pragma unroll
  for (int j = 0; j < HELD; j++) if (from + j < begin_of(first_slice + 1)) load(from + j, held[j]);
  mill_wait<1>();
  turn(from);
  __syncthreads();
  float4 pair[PARTS];
  auto sum_of = [&](int p) {
    const float* sums = acc[p / NT][p % NT];
    return make_float4(sums[0], sums[1], sums[2], sums[3]);
  };
  auto add = [&](float4 one, float4 two) {
    return make_float4(one.x + two.x, one.y + two.y, one.z + two.z, one.w + two.w);
  };
  #pragma unroll 1
  for (int slice = first_slice; slice < last_slice; slice++) {
    const int begin = begin_of(slice), count = begin_of(slice + 1) - begin;
    const int next = slice + 1 < last_slice ? begin_of(slice + 2) - begin - count : 0;
    clear();
    if (count == 0) {
      #pragma unroll
      for (int j = 0; j < HELD; j++) if (j < next) load(begin + j, held[j]);
    }
    #pragma unroll 1
    for (int at = 0; at < count; at += HELD) {
      const bool last = at + HELD >= count;
      #pragma unroll
      for (int j = 0; j < HELD; j++) {
        const int unit = begin + at + j;
        if (at + j < count) {
          bring(unit + 2);
          mill_wait<1>();
          turn(unit + 1);
          multiply(held[j], [&](int block, int n) { return *place(unit, block, n); });
          __syncthreads();
        }
        if (last ? j < next : at + j + HELD < count) load(last ? begin + count + j : unit + HELD, held[j]);
      }
    }
    if (S == SLICES || slice % 2 == 0) {
      #pragma unroll
      for (int p = 0; p < PARTS; p++) pair[p] = sum_of(p);
    } else if (S > 1) {
      #pragma unroll
      for (int p = 0; p < PARTS; p++) pair[p] = add(pair[p], sum_of(p));
    } else {
      #pragma unroll
      for (int p = 0; p < PARTS; p++) {
        const float4 sum = add(pair[p], sum_of(p));
        run[p * TH] = slice == 1 ? sum : add(run[p * TH], sum);
      }
    }
  }
  if (NORM) end_squares(last_slice);
  mill_wait<0>();
  __syncthreads();
  float* totals = reinterpret_cast<float*>(ring);
  auto keep = [&](int p, float4 sum) {
    const float sums[4] = {sum.x, sum.y, sum.z, sum.w};
    #pragma unroll
    for (int c = 0; c < 4; c++)
      totals[(p % NT * 8 + t * 2 + c % 2) * LINE + (nw * MT + p / NT) * 16 + g + c / 2 * 8] = sums[c];
  };
  auto keep_square = [&](int o, float sum) {
#if NORM
    const int n = o * NW + nw;
    if (n < NT && t == g / 2) totals[(n * 8 + g) * LINE + BN] = rsqrtf(sum / K + EPS);
#endif
  };
"""

MANY_WHOLE = """
  #pragma unroll
  for (int p = 0; p < PARTS; p++) keep(p, run[p * TH]);
  #pragma unroll
  for (int o = 0; o < OWN; o++) keep_square(o, square[o]);
  __syncthreads();
"""

# The block that comes last adds all parts, in their order.
MANY_SHARED = """
  {
    const int shared_tile = tile * bands + band;
    constexpr int SIZE = (PARTS * 4 + OWN) * TH;
    float* const all = partial + (size_t)shared_tile * S * SIZE;
    float* const mine = all + part * SIZE;
    #pragma unroll
    for (int p = 0; p < PARTS; p++) __stcg(reinterpret_cast<float4*>(mine) + p * TH + threadIdx.x, pair[p]);
    if (NORM) {
      #pragma unroll
      for (int o = 0; o < OWN; o++) __stcg(mine + (PARTS * 4 + o) * TH + threadIdx.x, square[o]);
    }
    __threadfence();
    __syncthreads();
    __shared__ unsigned come;
    unsigned* ticket = const_cast<unsigned*>(tickets) + shared_tile;
    if (threadIdx.x == 0) come = atomicAdd(ticket, 1u);
    __syncthreads();
    if (come != S - 1) return;
    if (threadIdx.x == 0) *ticket = 0u;
    __threadfence();
    constexpr int STEP = S == SLICES ? 2 : 1;
    auto part_of = [&](int s, int p) {
      return __ldcg(reinterpret_cast<const float4*>(all + s * SIZE) + p * TH + threadIdx.x);
    };
    #pragma unroll 32 / S
    for (int p = 0; p < PARTS; p++) {
      float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
      #pragma unroll
      for (int s = 0; s < S; s += STEP) {
        const float4 one = STEP == 1 ? part_of(s, p) : add(part_of(s, p), part_of(s + 1, p));
        sum = s == 0 ? one : add(sum, one);
      }
      keep(p, sum);
    }
    if (NORM) {
      #pragma unroll
      for (int o = 0; o < OWN; o++) {
        float sum = 0.f;
        #pragma unroll
        for (int s = 0; s < S; s += STEP) {
          const float* at = all + s * SIZE + (PARTS * 4 + o) * TH + threadIdx.x;
          sum += STEP == 1 ? __ldcg(at) : __ldcg(at) + __ldcg(at + SIZE);
        }
        keep_square(o, sum);
      }
    }
    __syncthreads();
  }
"""
