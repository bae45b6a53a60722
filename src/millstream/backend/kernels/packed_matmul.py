"""Small-batch matmuls with packed weights as CUDA kernels: x @ w.T over MLX's quantised formats, for few rows.

MLX's own kernels read the weight once for each row of a decode step. Here a block unpacks each weight once, in
registers, and multiplies it with up to 64 rows. It takes some tiles of 16 rows of the weight, and its warps take turns
along K. Packed numbers are a quarter of the traffic, so the rows of x, which every block reads from the L2 cache, count
for more: large weights take more tiles per block.

How a sum is split depends on the weight alone (`Split`), so a row gets the same numbers at every width.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from millstream.backend.kernels import packed_epilogues as epilogues
from millstream.backend.kernels.compiled import cuda_kernel
from millstream.backend.kernels.unpack_cuda import MODES, unpack_source
from millstream.backend.kernels.weights import Norm, Packed

ROWS_PER_BLOCK = 64
MAX_ROWS = 256
"""More rows than a block takes are a second block, which unpacks the weight again."""
BITS = {"affine": (2, 3, 4, 5, 6, 8), "mxfp4": (4,), "nvfp4": (4,), "mxfp8": (8,)}
GROUP_SIZES = {"affine": (32, 64, 128), "mxfp4": (32,), "nvfp4": (16,), "mxfp8": (32,)}
WARPS = 8

_HEADER = """
__device__ __forceinline__ float mill_squares(unsigned v, float more) {  // of a pair of bf16
  const float one = __uint_as_float(v << 16), two = __uint_as_float(v & 0xFFFF0000u);
  return __fmaf_rn(one, one, __fmaf_rn(two, two, more));
}
template <int BYTES> __device__ __forceinline__ void mill_fetch_part(void* to, const void* from, int valid) {
  const unsigned at = (unsigned)__cvta_generic_to_shared(to);
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(at), "l"(from), "r"(valid) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" :: "r"(at), "l"(from), "n"(BYTES), "r"(valid)
      : "memory");
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
"""

# The rows of tile m begin at r0 + m % SIDE * 16 + m / SIDE * APART of the weight: SIDE tiles side by side, and as many
# that belong to them (the other halves of heads, the values of gates) APART rows on. A warp owns OWN numbers of a row,
# then the next OWN after those of the other warps; it fetches CK of them at a time, which changes no sum.
_MATMUL = """
  constexpr int NT = ROWS / 8, WIDE = 16 * MT, LINE = WIDE + 1;
  constexpr int BLOCKS = CK / 32, PARTS = OWN / CK, XB = NT >= 4 ? 2 : (8 / NT < BLOCKS ? 8 / NT : BLOCKS);
  constexpr int RB = CK * BITS / 8, UNITS = RB / 16, PITCH = RB + (BITS == 8 ? 32 : 16);
  constexpr int SIZE = MODE == 0 ? 2 : 1, SB = CK / GS * SIZE, SPITCH = ALIGNED ? SB : SB + 4;
  constexpr int ARRAYS = MODE == 0 ? 2 : 1;
  constexpr int STAGE = WIDE * (PITCH + ARRAYS * SPITCH);
  const int N = w_shape[0], K = w_shape[1] * 32 / BITS;
  const int from_row = blockIdx.y * ROWS, live = min(ROWS, (int)x_shape[0] - from_row);
  const int row_bytes = K * BITS / 8, scale_bytes = K / GS * SIZE;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int r0 = blockIdx.x / GROUP * (GROUP * WIDE) + blockIdx.x % GROUP * (16 * SIDE);
  extern __shared__ uint4 shared[];
  char* ring = reinterpret_cast<char*>(shared) + warp * DEPTH * STAGE;
  const char* packed = reinterpret_cast<const char*>(w);
  auto row_of = [&](int i) { return r0 + i / 16 % SIDE * 16 + i / 16 / SIDE * APART + i % 16; };
  auto first_of = [&](int stage) { return (warp + stage / PARTS * W) * OWN + stage % PARTS * CK; };

  // The weight comes from far: DEPTH - 1 stages of it are on their way. A lane fetches what others use, in whole lines.
  auto fetch = [&](int stage) {
    const int k0 = first_of(stage);
    if (k0 < K) {
      char* to = ring + stage % DEPTH * STAGE;
      #pragma unroll
      for (int i = lane; i < WIDE * UNITS; i += 32) {
        const int row = i / UNITS, at = k0 / 8 * BITS + i % UNITS * 16;
        mill_fetch_part<16>(to + row * PITCH + i % UNITS * 16,
            packed + (size_t)row_of(row) * row_bytes + (at < row_bytes ? at : 0), at < row_bytes ? 16 : 0);
      }
      char* first = to + WIDE * PITCH;
      #pragma unroll
      for (int i = lane; i < WIDE * ARRAYS; i += 32) {
        const char* from = reinterpret_cast<const char*>(@SCALES@);
        const size_t at = (size_t)row_of(i % WIDE) * scale_bytes + k0 / GS * SIZE;
        if constexpr (ALIGNED) {
          mill_fetch_part<SB>(first + i * SPITCH, from + at, SB);
        } else {
          // From the word before, and not beyond the last.
          const size_t end = (size_t)N * scale_bytes;
          #pragma unroll
          for (int part = 0; part < SPITCH; part += 4) {
            const size_t word = (at & ~(size_t)3) + part;
            const int valid = word >= end ? 0 : end - word < 4 ? (int)(end - word) : 4;
            mill_fetch_part<4>(first + i * SPITCH + part, from + (valid ? word : 0), valid);
          }
        }
      }
    }
    mill_commit();
  };
  #pragma unroll
  for (int stage = 0; stage < DEPTH - 1; stage++) fetch(stage);

  // The rows come from the cache: the next blocks' are on their way while this one's are multiplied.
  uint4 b[XB][NT];
  const T* xp = x + (size_t)(from_row + g) * K + t * 8;
  auto read = [&](int k, uint4* to) {
    #pragma unroll
    for (int n = 0; n < NT; n++)
      to[n] = k < K && n * 8 + g < live ? *reinterpret_cast<const uint4*>(xp + (size_t)n * 8 * K + k)
                                        : make_uint4(0, 0, 0, 0);
  };
  float acc[MT][NT][4] = {};
  @NORM_SUMS@
  #pragma unroll
  for (int block = 0; block < XB - 1; block++) read(first_of(0) + block * 32, b[block]);
  for (int stage = 0; first_of(stage) < K; stage++) {
    mill_wait<DEPTH - 2>();
    __syncwarp();  // what all lanes fetched is there, and what they read before may be overwritten
    fetch(stage + DEPTH - 1);
    const char* at = ring + stage % DEPTH * STAGE;
    const int k0 = first_of(stage), next = first_of(stage + 1);
    unsigned scale[MT][2], bias[MT][2];
    #pragma unroll
    for (int block = 0; block < BLOCKS; block++) {
      constexpr int AHEAD = XB - 1;
      const int other = block + AHEAD;
      read(other < BLOCKS ? k0 + other * 32 : next + (other - BLOCKS) * 32, b[other % XB]);
      if (k0 + block * 32 < K) {
        uint4 row[NT];
        @NORM_ROWS@
        #pragma unroll
        for (int n = 0; n < NT; n++) row[n] = mill_as_packed<BITS>(row[n]);
        #pragma unroll
        for (int m = 0; m < MT; m++) {
          unsigned a[2][4];
          #pragma unroll
          for (int h = 0; h < 2; h++) {
            const int i = m * 16 + g + h * 8;
            if (block * 32 % GS == 0 || GS < 32) {
              const char* first = at + WIDE * PITCH + i * SPITCH + (block * 32 + t * 8) / GS * SIZE;
              if constexpr (!ALIGNED) first += ((size_t)row_of(i) * scale_bytes + k0 / GS * SIZE) & 3;
              scale[m][h] = mill_scale<MODE>(first);
              bias[m][h] = MODE == 0 ? mill_scale<MODE>(first + WIDE * SPITCH) : 0;
            }
            mill_unpack<BITS, MODE>(at + i * PITCH + (block * 4 + t) * BITS, scale[m][h], bias[m][h], a[h]);
          }
          #pragma unroll
          for (int n = 0; n < NT; n++) mill_mma(acc[m][n], a[0][0], a[1][0], a[0][1], a[1][1], row[n].x, row[n].y);
          #pragma unroll
          for (int n = 0; n < NT; n++) mill_mma(acc[m][n], a[0][2], a[1][2], a[0][3], a[1][3], row[n].z, row[n].w);
        }
      }
    }
  }
  // The warps' sums, tile by tile, are added where the weight lay.
  float* totals = reinterpret_cast<float*>(shared);
  float* parts = totals + ROWS * LINE;
  @NORM_SCALES@
  #pragma unroll
  for (int m = 0; m < MT; m++) {
    __syncthreads();
    #pragma unroll
    for (int n = 0; n < NT; n++)
      #pragma unroll
      for (int c = 0; c < 4; c++)
        parts[(warp * ROWS + n * 8 + t * 2 + c % 2) * 17 + g + c / 2 * 8] = acc[m][n][c];
    __syncthreads();
    for (int i = threadIdx.x; i < ROWS * 16; i += W * 32) {
      float total = 0.f;
      #pragma unroll
      for (int v = 0; v < W; v++) total += parts[(v * ROWS + i / 16) * 17 + i % 16];
      totals[i / 16 * LINE + m * 16 + i % 16] = total;
    }
  }
  __syncthreads();
  // Rounded, as the product alone would be, and again with its bias.
  auto sum = [&](int row, int col) {
    float total = float(T(totals[row * LINE + col] @NORMED@));
    @BIAS@
    return total;
  };
"""

_PLAIN_ROWS = """
        #pragma unroll
        for (int n = 0; n < NT; n++) row[n] = b[block % XB][n];
"""
# Each row is multiplied by the norm's weight here, and by what the norm divides by at the end.
_NORM_SUMS = "float squares[NT] = {};"
_NORM_ROWS = """
        const uint4 by = *reinterpret_cast<const uint4*>(norm + k0 + block * 32 + t * 8);
        #pragma unroll
        for (int n = 0; n < NT; n++) {
          row[n] = b[block % XB][n];
          squares[n] = mill_squares(row[n].x, mill_squares(row[n].y, squares[n]));
          squares[n] = mill_squares(row[n].z, mill_squares(row[n].w, squares[n]));
          row[n] = make_uint4(mill_mul2(row[n].x, by.x), mill_mul2(row[n].y, by.y), mill_mul2(row[n].z, by.z),
                              mill_mul2(row[n].w, by.w));
        }
"""
_NORM_SCALES = """
  __shared__ float divisors[ROWS];
  __syncthreads();
  #pragma unroll
  for (int n = 0; n < NT; n++) {
    float total = squares[n] + __shfl_xor_sync(0xffffffffu, squares[n], 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    if (t == 0) parts[warp * ROWS + n * 8 + g] = total;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < ROWS; i += W * 32) {
    float total = 0.f;
    #pragma unroll
    for (int v = 0; v < W; v++) total += parts[v * ROWS + i];
    divisors[i] = rsqrtf(total / K + NORM_EPS);
  }
"""


@dataclass(frozen=True, slots=True)
class Split:
    """How the sums over a weight's rows are split: `own` numbers for a warp, then as many for the next."""

    own: int
    warps: int

    @classmethod
    def of(cls, weight: Packed) -> Split:
        """Whole lines of the cache, of 128 bytes, and whole groups."""
        own = 256 if weight.bits <= 4 or weight.group_size == 128 else 128
        return cls(own, min(WARPS, -(-weight.inputs // own)))


@dataclass(frozen=True, slots=True)
class Tiling:
    """What a block takes: so many `tiles` of the weight, `rows` of x, and `depth` stages of `stage` numbers."""

    tiles: int
    rows: int
    stage: int
    depth: int

    def shared_bytes(self, weight: Packed, split: Split) -> int:
        """For the ring buffer of the weight, and where it lay for the warps' sums."""
        wide, size, arrays = 16 * self.tiles, *((2, 2) if weight.mode == "affine" else (1, 1))
        numbers = self.stage * weight.bits // 8 + (32 if weight.bits == 8 else 16)
        scales = self.stage // weight.group_size * size + (0 if weight.inputs % self.stage == 0 else 4)
        ring = split.warps * self.depth * wide * (numbers + arrays * scales)
        return max(ring, 4 * self.rows * (wide + 1 + split.warps * 17))


@dataclass(frozen=True, slots=True)
class Work:
    """What a kernel does besides the product: its name, more inputs by name, and source."""

    name: str
    epilogue: str = epilogues.STORE
    tiling: str = epilogues.SINGLE_TILES
    outputs: tuple[str, ...] = ("out",)
    inputs: tuple[str, ...] = ()
    biased: bool = False
    eps: float | None = None
    """Of the norm before it, if there is one."""


def shared_limit() -> int:
    """The bytes of shared memory that a block may have, by the compute capability."""
    info = mx.device_info()
    major, minor = (int(info.get(f"compute_capability_{part}", 0)) for part in ("major", "minor"))
    large = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}
    return large.get((major, minor), 99) * 1024


@functools.cache
def _kernel(work: Work, weight: tuple[str, bool], dtype: mx.Dtype, shared: int) -> Any:
    mode, affine = weight
    source = _MATMUL.replace("@SCALES@", "(i < WIDE ? scales : zeros)" if affine else "scales")
    normed = work.eps is not None
    for name, text in {
        "@NORM_SUMS@": _NORM_SUMS if normed else "",
        "@NORM_ROWS@": _NORM_ROWS if normed else _PLAIN_ROWS,
        "@NORM_SCALES@": _NORM_SCALES.replace("NORM_EPS", _float(work.eps)) if normed else "",
        "@NORMED@": "* divisors[row]" if normed else "",
        "@BIAS@": "total = float(T(total + float(added[row_of(col)])));" if work.biased else "",
    }.items():
        source = source.replace(name, text)
    names = ["x", "w", "scales", *(["zeros"] if affine else []), *(["norm"] if normed else [])]
    names += [*(["added"] if work.biased else []), *work.inputs]
    return cuda_kernel(
        name=f"millstream_packed_{work.name}_{mode}",
        input_names=names,
        output_names=list(work.outputs),
        source=work.tiling + source + work.epilogue,
        header=_HEADER.replace("KIND", "f16" if dtype == mx.float16 else "bf16") + unpack_source(dtype),
        shared_memory=shared,
    )


def run(
    work: Work,
    tiling: Tiling,
    x: mx.array,
    weight: Packed,
    rest: Sequence[mx.array],
    shapes: Sequence[tuple[int, ...]],
    sizes: tuple[tuple[str, int], ...] = (),
) -> list[mx.array]:
    """Launch a kernel. `rest`: the norm's weight, the bias and the inputs of the epilogue, as far as there are any."""
    split = Split.of(weight)
    biases = [weight.biases] if weight.mode == "affine" else []
    shared = tiling.shared_bytes(weight, split)
    threads = split.warps * 32
    out: list[mx.array] = _kernel(work, (weight.mode, bool(biases)), x.dtype, shared)(
        inputs=[x, weight.packed, weight.scales, *biases, *rest],
        output_shapes=list(shapes),
        output_dtypes=[x.dtype] * len(shapes),
        grid=(weight.outputs // (16 * tiling.tiles) * threads, -(-x.shape[0] // tiling.rows), 1),
        threadgroup=(threads, 1, 1),
        template=[
            ("T", x.dtype),
            ("ROWS", tiling.rows),
            ("MT", tiling.tiles),
            ("W", split.warps),
            ("DEPTH", tiling.depth),
            ("OWN", split.own),
            ("CK", tiling.stage),
            ("BITS", weight.bits),
            ("GS", weight.group_size),
            ("MODE", MODES[weight.mode]),
            ("ALIGNED", weight.inputs % tiling.stage == 0),
            *sizes,
        ],
    )
    return out


def fits(weight: Packed) -> bool:
    """True if the kernels can take this weight."""
    scales = (mx.bfloat16, mx.float16) if weight.mode == "affine" else (mx.uint8,)
    return (
        weight.bits in BITS.get(weight.mode, ())
        and weight.group_size in GROUP_SIZES[weight.mode]
        and weight.packed.ndim == 2
        and weight.scales.dtype in scales
        and weight.inputs % 32 == 0
        and weight.inputs * weight.bits % 128 == 0
        and weight.outputs % 32 == 0
    )


def tilings(weight: Packed, rows: int, tiles: Sequence[int] = (1, 2, 4)) -> list[Tiling]:
    """The tilings that can compute so many rows, those with the fewest tiles first. Blocks with few tiles are many, so
    that more of the weight is on its way; those with many tiles read x less often."""
    split, limit, found = Split.of(weight), shared_limit(), []
    height = min(ROWS_PER_BLOCK, -(-rows // 8) * 8)
    for count in tiles:
        if weight.outputs % (16 * count):
            continue
        height = min(height, 256 // count)
        least = 256 if weight.group_size == 128 else 128
        stage = split.own if count <= 2 else least
        depths = [depth for depth in (4, 3, 2) if _shared(weight, split, count, height, stage, depth) <= limit // 2]
        depth = depths[0] if depths else 2
        if _shared(weight, split, count, height, stage, depth) <= limit:
            found.append(Tiling(count, height, stage, depth))
    return found


def _shared(weight: Packed, split: Split, tiles: int, rows: int, stage: int, depth: int) -> int:
    return Tiling(tiles, rows, stage, depth).shared_bytes(weight, split)


def choose(weight: Packed, rows: int, tiles: Sequence[int] = (1, 2, 4)) -> Tiling:
    return tilings(weight, rows, tiles)[-1]


def _norm_of(x: mx.array, norm: Norm | None) -> tuple[mx.array, float | None, list[mx.array]]:
    """x, and the norm's part in the kernel. In float16 the product with a norm's weight could overflow."""
    if norm is None:
        return x, None, []
    if x.dtype == mx.bfloat16 and norm.weight.dtype == mx.bfloat16:
        return x, norm.eps, [norm.weight]
    return mx.fast.rms_norm(x, norm.weight, norm.eps), None, []


def matmul(x: mx.array, weight: Packed, *, bias: mx.array | None = None, norm: Norm | None = None) -> mx.array:
    """norm(x) @ weight.T + bias for x of (rows, 1, size)."""
    x, eps, rest = _norm_of(x, norm)
    work = Work("matmul", biased=bias is not None, eps=eps)
    rest += [] if bias is None else [bias]
    return run(work, choose(weight, x.shape[0]), x, weight, rest, [(*x.shape[:-1], weight.outputs)])[0]


def matmul_add(
    x: mx.array,
    weight: Packed,
    residual: mx.array,
    *,
    bias: mx.array | None = None,
    norm: Norm | None = None,
    factor: float = 1.0,
) -> mx.array:
    """residual + factor * (norm(x) @ weight.T + bias)"""
    x, eps, rest = _norm_of(x, norm)
    epilogue = epilogues.ADD.replace("FACTOR", _float(factor))
    work = Work("matmul_add", epilogue, inputs=("residual",), biased=bias is not None, eps=eps)
    rest += [*([] if bias is None else [bias]), residual]
    return run(work, choose(weight, x.shape[0]), x, weight, rest, [(*x.shape[:-1], weight.outputs)])[0]


def glu(
    x: mx.array,
    weight: Packed,
    *,
    activation: str = "silu",
    bias: mx.array | None = None,
    norm: Norm | None = None,
) -> mx.array:
    """activation(gate) * up, where the first half of the weight's rows gives the gate."""
    x, eps, rest = _norm_of(x, norm)
    epilogue = epilogues.GLU.replace("ACTIVATE", epilogues.ACTIVATIONS[activation])
    work = Work(f"{activation}_glu", epilogue, epilogues.PAIRED_TILES, biased=bias is not None, eps=eps)
    rest += [] if bias is None else [bias]
    tiling = choose(weight, x.shape[0], (2, 4))
    return run(work, tiling, x, weight, rest, [(*x.shape[:-1], weight.outputs // 2)])[0]


def fits_heads(size: int) -> bool:
    """True if `qkv_rope` can take heads of this size: half of one must be whole tiles."""
    return size % 32 == 0


def qkv_rope(
    x: mx.array,
    weight: Packed,
    offset: mx.array,
    periods: mx.array | None,
    heads: int,
    groups: int,
    size: int,
    *,
    bias: mx.array | None = None,
    norm: Norm | None = None,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
    factor: float = 1.0,
) -> tuple[mx.array, mx.array, mx.array]:
    """Queries, keys and values of (rows, heads or groups, 1, size); norms of single heads and then RoPE are applied to
    the first two."""
    x, eps, rest = _norm_of(x, norm)
    rest += [] if bias is None else [bias]
    whole = q_norm is not None or periods is None or 2 * periods.shape[0] != size or factor != 1.0
    inputs: tuple[str, ...] = () if periods is None else ("offset", "periods")
    rest += [] if periods is None else [offset, periods]
    epilogue, tiles, choice = epilogues.ROPE, epilogues.HALF_HEAD_TILES, [2, *([4] if size % 64 == 0 else [])]
    if whole:
        text = ""
        if q_norm is not None:
            assert k_norm is not None, "both or none"
            inputs += ("q_scale", "k_scale")
            rest += [q_norm.weight, k_norm.weight]
            text = epilogues.HEAD_NORM.replace("Q_EPS", _float(q_norm.eps)).replace("K_EPS", _float(k_norm.eps))
        turn = "" if periods is None else epilogues.HEAD_TURN.replace("FACTOR", _float(factor))
        epilogue = epilogues.HEADS.replace("HEAD_NORM", text).replace("HEAD_TURN", turn)
        tiles, choice = epilogues.SINGLE_TILES, [size // 16]
    work = Work(
        "heads" if whole else "qkv_rope", epilogue, tiles, ("q", "keys", "values"), inputs, bias is not None, eps
    )
    rows = x.shape[0]
    shapes = [(rows, heads, 1, size), (rows, groups, 1, size), (rows, groups, 1, size)]
    sizes = (("H", heads), ("KV", groups), ("D", size), ("P", 0 if periods is None else periods.shape[0]))
    queries, keys, values = run(work, choose(weight, rows, choice), x, weight, rest, shapes, sizes)
    return queries, keys, values


def _float(value: float) -> str:
    return f"{value!r}f"
