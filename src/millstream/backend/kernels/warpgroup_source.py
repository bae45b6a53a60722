"""The CUDA source of the few-row matmuls for GPUs whose warps multiply in groups of four, from shared memory (sm_90).

There one instruction takes 64 rows of the weight and all rows of x, so nothing passes through registers on its way to
the product, and 64 rows cost little more than one. A block takes BN = 16 * NW rows of the weight; S blocks share a tile
and split K. S depends on the weight alone, so a row gets bitwise the same numbers at every width, with every BN.

Lines of 128 bytes, 64 numbers of a row, lie in shared memory as the instruction wants them: eight lines are a piece of
1,024 bytes, and the 16-byte chunks of line i are exchanged by the bits of i.
"""

from __future__ import annotations

PIECE = 1024
"""Bytes that tiles in shared memory are aligned to."""

_HEADER = """
__device__ __forceinline__ void mill_fetch_row(void* to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
    :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "r"(bytes) : "memory");
}
// What this thread has written to shared memory can be seen by products.
__device__ __forceinline__ void mill_expose() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ unsigned long long mill_tile(const void* at) {
  unsigned long long shared;
  asm volatile("cvta.to.shared.u64 %0, %1;" : "=l"(shared) : "l"(at));
  return (shared & 0x3ffff) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
__device__ __forceinline__ void mill_begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void mill_end_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}
template <int N> __device__ __forceinline__ void mill_hold(float* sums) {
  #pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(sums[i]) :: "memory");
}
"""


def _products(width: int, half: bool) -> str:
    """Sixty-four lines of the weight times `width` rows, over sixteen numbers."""
    count, kind = width // 2, "f16" if half else "bf16"
    sums = ", ".join(f"%{index}" for index in range(count))
    registers = ", ".join(f'"+f"(sums[{index}])' for index in range(count))
    return f"""
__device__ __forceinline__ void mill_products_{width}(float* sums, unsigned long long lines,
    unsigned long long rows) {{
  asm volatile("{{ .reg .pred p; setp.ne.b32 p, 1, 0; "
    "wgmma.mma_async.sync.aligned.m64n{width}k16.f32.{kind}.{kind} "
    "{{{sums}}}, %{count}, %{count + 1}, p, 1, 1, 0, 0; }}"
    : {registers} : "l"(lines), "l"(rows));
}}
"""


def header(half: bool, widths: tuple[int, ...]) -> str:
    """The helpers of this source, for float16 or bfloat16, beside those of `matmul_source`."""
    choice = " else ".join(f"if constexpr (N == {width}) mill_products_{width}(sums, lines, rows);" for width in widths)
    products = "".join(_products(width, half) for width in widths)
    return f"""{_HEADER}{products}
template <int N>
__device__ __forceinline__ void mill_products(float* sums, unsigned long long lines, unsigned long long rows) {{
  {choice}
}}
"""


# A thread fetches the same chunk of every SWEEP-th line, of the weight and of x. With a norm it multiplies its own
# chunks of x by the norm's weight before anybody reads them, and adds up their squares.
PRODUCT = """
  constexpr int STAGE = (BN + ROWS) * 128, SWEEP = TH / 8, OWN = BN / SWEEP, OWN_X = (ROWS + SWEEP - 1) / SWEEP;
  const int K = w_shape[1], STEPS = K / 64;
  const int begin = int((long long)STEPS * part / S), count = int((long long)STEPS * (part + 1) / S) - begin;
  char* stages = reinterpret_cast<char*>(ring) + (-(unsigned)__cvta_generic_to_shared(ring) & 1023u);
  const int chunk = threadIdx.x % 8, mine = threadIdx.x / 8, place = mine * 128 + (chunk ^ mine % 8) * 16;
  const T* wp[OWN];
  unsigned xp[OWN_X];  // in chunks
  #pragma unroll
  for (int i = 0; i < OWN; i++) wp[i] = w + (size_t)line(i * SWEEP + mine) * K + begin * 64 + chunk * 8;
  #pragma unroll
  for (int i = 0; i < OWN_X; i++)
    xp[i] = (unsigned)min(first + i * SWEEP + mine, R - 1) * (K / 8) + begin * 8 + chunk;
  auto fetch = [&](int step) {
    if (step < count) {
      char* to = stages + step % DEPTH * STAGE + place;
      #pragma unroll
      for (int i = 0; i < OWN; i++) mill_stream(to + i * SWEEP * 128, wp[i] + step * 64);
      #pragma unroll
      for (int i = 0; i < OWN_X; i++)
        if (ROWS % SWEEP == 0 || i * SWEEP + mine < ROWS)
          mill_fetch_row(to + (BN + i * SWEEP) * 128, x + (size_t)(xp[i] + step * 8) * 8,
              i * SWEEP + mine < rows ? 16 : 0);
    }
    mill_commit();
  };
  #pragma unroll
  for (int c = 0; c < DEPTH - 1; c++) fetch(c);
  float acc[NT * 4] = {};
#if NORM
  float squares[OWN_X][2] = {};
  const T* np = norm + begin * 64 + chunk * 8;
  uint4 scale = {};
  if (count > 0) scale = *reinterpret_cast<const uint4*>(np);
#endif
  #pragma unroll 1
  for (int c = 0; c < count; c++) {
    char* stage = stages + c % DEPTH * STAGE;
    mill_wait<DEPTH - 2>();
#if NORM
    const uint4 by = scale;
    if (c + 1 < count) scale = *reinterpret_cast<const uint4*>(np + (c + 1) * 64);
    #pragma unroll
    for (int i = 0; i < OWN_X; i++)
      if (ROWS % SWEEP == 0 || i * SWEEP + mine < ROWS) {
        uint4* own = reinterpret_cast<uint4*>(stage + (BN + i * SWEEP) * 128 + place);
        const uint4 numbers = *own;
        mill_squares(numbers, squares[i]);
        *own = mill_scaled(numbers, by);
      }
#endif
    mill_expose();
    __syncthreads();
    fetch(c + DEPTH - 1);
    mill_hold<NT * 4>(acc);
    mill_begin_products();
    #pragma unroll
    for (int k = 0; k < 4; k++)
      mill_products<ROWS>(acc, mill_tile(stage + warp / 4 * 8192 + k * 32), mill_tile(stage + BN * 128 + k * 32));
    mill_end_products();
    mill_hold<NT * 4>(acc);
  }
"""

# Where the sums of all threads go, and those of squares.
SUMS = """
  mill_wait<0>();
  __syncthreads();
  float* totals = reinterpret_cast<float*>(stages);
  auto keep = [&](int n, float4 sums) {
    float* to = totals + (n * 8 + t * 2) * LINE + warp * 16 + g;
    to[0] = sums.x;
    to[LINE] = sums.y;
    to[8] = sums.z;
    to[LINE + 8] = sums.w;
  };
#if NORM
  float square[OWN_X];
  #pragma unroll
  for (int i = 0; i < OWN_X; i++) {
    square[i] = squares[i][0] + squares[i][1];
    #pragma unroll
    for (int o = 1; o < 8; o *= 2) square[i] += __shfl_xor_sync(0xffffffffu, square[i], o);
  }
#endif
"""

# As in `matmul_source`, `totals[row * LINE + column]` are the sums over all of K, and the last number of a line is the
# row's factor of the norm.
WHOLE = """
  #pragma unroll
  for (int n = 0; n < NT; n++) keep(n, make_float4(acc[n * 4], acc[n * 4 + 1], acc[n * 4 + 2], acc[n * 4 + 3]));
#if NORM
  #pragma unroll
  for (int i = 0; i < OWN_X; i++)
    if (chunk == 0 && i * SWEEP + mine < ROWS)
      totals[(i * SWEEP + mine) * LINE + BN] = rsqrtf(square[i] / K + EPS);
#endif
  __syncthreads();
"""

# S blocks have a part of K each. The one that comes last adds all parts, in their order.
SHARED = """
  {
    constexpr int PART = ROWS * LINE;
    const int shared_tile = tile * bands + band;
    float* all = partial + (size_t)shared_tile * S * PART;
    float4* own = reinterpret_cast<float4*>(all + part * PART);
    #pragma unroll
    for (int n = 0; n < NT; n++)
      if (n * 8 < rows)
        __stcg(own + n * TH + threadIdx.x,
            make_float4(acc[n * 4], acc[n * 4 + 1], acc[n * 4 + 2], acc[n * 4 + 3]));
#if NORM
    #pragma unroll
    for (int i = 0; i < OWN_X; i++)
      if (chunk == 0 && i * SWEEP + mine < ROWS) __stcg(all + part * PART + ROWS * BN + i * SWEEP + mine, square[i]);
#endif
    __threadfence();
    __syncthreads();
    __shared__ unsigned come;
    unsigned* ticket = const_cast<unsigned*>(tickets) + shared_tile;
    if (threadIdx.x == 0) come = atomicAdd(ticket, 1u);
    __syncthreads();
    if (come != S - 1) return;
    if (threadIdx.x == 0) *ticket = 0u;
    __threadfence();
    // It comes from far, so what the registers hold should be on its way at once: nothing is stored before it is read.
    constexpr int AT_ONCE = NT < 8 ? NT : 8;
    #pragma unroll 1
    for (int begun = 0; begun < NT && begun * 8 < rows; begun += AT_ONCE) {
      float4 sums[AT_ONCE];
      #pragma unroll
      for (int j = 0; j < S; j++) {
        const float4* from = reinterpret_cast<const float4*>(all + j * PART) + begun * TH + threadIdx.x;
        #pragma unroll
        for (int n = 0; n < AT_ONCE; n++)
          if ((begun + n) * 8 < rows) {
            const float4 more = __ldcg(from + n * TH);
            sums[n] = j == 0 ? more : make_float4(sums[n].x + more.x, sums[n].y + more.y, sums[n].z + more.z,
                sums[n].w + more.w);
          }
      }
      #pragma unroll
      for (int n = 0; n < AT_ONCE; n++)
        if ((begun + n) * 8 < rows) keep(begun + n, sums[n]);
    }
#if NORM
    for (int row = threadIdx.x; row < rows; row += TH) {
      float sum = __ldcg(all + ROWS * BN + row);
      #pragma unroll
      for (int j = 1; j < S; j++) sum += __ldcg(all + j * PART + ROWS * BN + row);
      totals[row * LINE + BN] = rsqrtf(sum / K + EPS);
    }
#endif
    __syncthreads();
  }
"""
