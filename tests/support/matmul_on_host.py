"""Runs the source of a few-row matmul on the CPU: g++ compiles it, behind functions that do what its PTX does.

A copy to shared memory happens when it is waited for, as late as it may. A product of a group of warps reads its tiles
as the device does: in pieces of 1,024 bytes whose chunks are exchanged. Shared memory begins as NaNs.
"""

from __future__ import annotations

import ctypes
import functools
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from millstream.backend.kernels import matmul_source, packed_groups, warpgroup_source
from millstream.backend.kernels.matmul_tilings import MANY_WIDTHS, WIDTHS, Tiling
from millstream.backend.kernels.small_matmul import Kind
from millstream.backend.kernels.unpack_cuda import unpack_source
from millstream.backend.kernels.weights import Packed, Weight
from support.cuda_on_host import compile_for_host

_SHIM = r"""
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static float __uint_as_float(unsigned bits) { float value; memcpy(&value, &bits, 4); return value; }
struct Bf16 {
  uint16_t bits;
  Bf16() = default;
  explicit Bf16(float value) {
    unsigned all;
    memcpy(&all, &value, 4);
    bits = (all + 0x7fff + (all >> 16 & 1)) >> 16;
  }
  operator float() const { return __uint_as_float((unsigned)bits << 16); }
};
struct __nv_bfloat162 { Bf16 x, y; };
static __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162 b) { return {Bf16(a.x * b.x), Bf16(a.y * b.y)}; }
static float rsqrtf(float value) { return 1.f / std::sqrt(value); }
template <typename V> static void __stcg(V* to, V value) { *to = value; }
template <typename V> static V __ldcg(const V* from) { return *from; }
static void __threadfence() {}
static unsigned atomicAdd(unsigned* to, unsigned more) { const unsigned old = *to; *to += more; return old; }

struct Copy { void* to; const void* from; int bytes, size; };
static std::vector<std::vector<Copy>> groups[THREADS];
static std::vector<Copy> open_group[THREADS];
static void mill_fetch_row(void* to, const void* from, int bytes) {
  open_group[threadIdx.x].push_back({to, from, bytes, 16});
}
template <int SIZE> static void mill_fetch_piece(void* to, const void* from, int valid) {
  open_group[threadIdx.x].push_back({to, from, valid, SIZE});
}
static void mill_stream(void* to, const void* from) { mill_fetch_row(to, from, 16); }
static void mill_commit() {
  groups[threadIdx.x].push_back(open_group[threadIdx.x]);
  open_group[threadIdx.x].clear();
}
template <int N> static void mill_wait() {
  auto& mine = groups[threadIdx.x];
  for (; mine.size() > N; mine.erase(mine.begin()))
    for (const Copy& copy : mine[0]) {
      memset(copy.to, 0, copy.size);
      memcpy(copy.to, copy.from, copy.bytes);
    }
}
static size_t __cvta_generic_to_shared(const void* at) { return (size_t)at; }
static void mill_warm(const void*) {}
static void mill_expose() {}
static void mill_begin_products() {}
static void mill_end_products() {}
template <int N> static void mill_hold(float*) {}
static unsigned long long mill_tile(const void* at) { return (unsigned long long)at; }
static float number(unsigned long long tile, int line, int k) {
  unsigned long long at = tile + line / 8 * 1024 + line % 8 * 128 + k * 2;
  at ^= (at >> 7 & 7) << 4;
  Bf16 value;
  memcpy(&value, (const void*)at, 2);
  return value;
}
template <int N> static void mill_products(float* sums, unsigned long long lines, unsigned long long rows) {
  const int warp = threadIdx.x / 32 % 4, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  for (int i = 0; i < N / 2; i++) {
    float sum = 0.f;
    for (int k = 0; k < 16; k++)
      sum += number(lines, warp * 16 + g + i % 4 / 2 * 8, k) * number(rows, i / 4 * 8 + t * 2 + i % 2, k);
    sums[i] += sum;
  }
}
alignas(1024) static char shared_memory[SHARED_BYTES];
"""

_PACKED_SHIM = r"""
struct __half { uint16_t bits; };
static __half __float2half(float) { return {}; }
static __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
  return {Bf16(std::fma(a.x, b.x, c.x)), Bf16(std::fma(a.y, b.y, c.y))};
}
static __nv_bfloat162 __hadd2(__nv_bfloat162 a, __nv_bfloat162 b) { return {Bf16(a.x + b.x), Bf16(a.y + b.y)}; }
static unsigned __byte_perm(unsigned low, unsigned high, unsigned which) {
  const unsigned long long both = (unsigned long long)high << 32 | low;
  unsigned made = 0;
  for (int i = 0; i < 4; i++) made |= (unsigned)(both >> (which >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return made;
}
template <typename V> static V __ldg(const V* from) { return *from; }
static unsigned mill_pick(unsigned v, unsigned mask, unsigned bits) { return (v & mask) | bits; }
static void mill_fetch_part(void* to, const void* from, int valid) { mill_fetch_row(to, from, valid); }
template <int WORDS> static void mill_words(const char* from, unsigned* to) { memcpy(to, from, WORDS * 4); }
template <typename V> static void mill_keep(V&) {}
static unsigned long long mill_further(unsigned long long tile, int bytes) { return tile + bytes; }
static float half_of(unsigned pair, int which) { return __uint_as_float(which ? pair & 0xffff0000u : pair << 16); }
// Sixteen numbers of sixteen lines times those of eight rows: a lane has a part of all, as the device deals them out.
static void mill_mma(float* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  static unsigned slots[2][THREADS][6];
  static int turns[THREADS];
  const int me = threadIdx.x, turn = turns[me] ^= 1, warp = me / 32 * 32, g = me % 32 / 4, t = me % 4;
  const unsigned mine[6] = {a0, a1, a2, a3, b0, b1};
  memcpy(slots[turn][me], mine, sizeof(mine));
  __syncwarp();
  for (int i = 0; i < 4; i++) {
    float sum = 0.f;
    for (int k = 0; k < 16; k++) {
      const unsigned* line = slots[turn][warp + g * 4 + k % 8 / 2];
      const unsigned* row = slots[turn][warp + (t * 2 + i % 2) * 4 + k % 8 / 2];
      sum += half_of(line[i / 2 + k / 8 * 2], k % 2) * half_of(row[4 + k / 8], k % 2);
    }
    c[i] += sum;
  }
}
// A group of warps multiplies with lines in registers as late as it may, too: when it is waited for.
struct Held { float* sums; const unsigned* lines; unsigned long long rows; int width; };
static std::vector<std::vector<Held>> begun[THREADS];
static std::vector<Held> open_products[THREADS];
template <int N> static void mill_held_products(float* sums, const unsigned* lines, unsigned long long rows) {
  open_products[threadIdx.x].push_back({sums, lines, rows, N});
}
static void mill_commit_products() {
  begun[threadIdx.x].push_back(open_products[threadIdx.x]);
  open_products[threadIdx.x].clear();
}
static void multiply_held(const Held& one) {
  static unsigned slots[2][THREADS][4];
  static int turns[THREADS];
  const int me = threadIdx.x, turn = turns[me] ^= 1, warp = me / 32 * 32, g = me % 32 / 4, t = me % 4;
  memcpy(slots[turn][me], one.lines, 16);
  __syncwarp();
  for (int i = 0; i < one.width / 2; i++) {
    float sum = 0.f;
    for (int k = 0; k < 16; k++) {
      const unsigned* line = slots[turn][warp + g * 4 + k % 8 / 2];
      sum += half_of(line[i % 4 / 2 + k / 8 * 2], k % 2) * number(one.rows, i / 4 * 8 + t * 2 + i % 2, k);
    }
    one.sums[i] += sum;
  }
}
template <int N> static void mill_wait_products() {
  auto& mine = begun[threadIdx.x];
  for (; mine.size() > N; mine.erase(mine.begin()))
    for (const Held& one : mine[0]) multiply_held(one);
}
"""


def _without_ptx(source: str) -> str:
    """The functions of a header that have no PTX in them."""
    return "".join(part for part in re.split(r"(?=__device__|template <|\nconstexpr )", source) if "asm" not in part)


def run_on_host(
    kind: Kind,
    tiling: Tiling,
    width: int,
    weight: Weight,
    inputs: Sequence[mx.array],
    shapes: Sequence[tuple[int, ...]],
    heads: tuple[tuple[str, int], ...] = (),
) -> list[mx.array]:
    """What `small_matmul.run` gives, for bfloat16 and warp groups or packed weights."""
    assert width in WIDTHS or (tiling.warpgroups and width in MANY_WIDTHS)
    assert tiling.warpgroups or isinstance(weight, Packed)
    split = tiling.split > 1
    tiles, bands = -(-weight.outputs // tiling.lines), -(-inputs[0].shape[0] // width)
    named = dict(zip(kind.inputs, inputs, strict=True))
    made = dict(zip(kind.outputs, shapes, strict=True))
    given = {name: _numbers(array) for name, array in named.items()}
    outs = {name: np.full(shape, 0x7FFF, dtype=np.uint16) for name, shape in made.items()}
    if split:
        given["tickets"] = np.zeros(tiles * bands, dtype=np.uint32)
        outs["partial"] = np.zeros(tiles * bands * tiling.partial_floats(width), dtype=np.float32)
    library = _library(kind, tiling, width, heads, {name: array.shape for name, array in named.items()}, given, outs)
    arrays = [*given.values(), *outs.values()]
    blocks = tiling.blocks(tiles * bands, width)
    library.run(*(array.ctypes.data_as(ctypes.c_void_p) for array in arrays), blocks)
    assert not split or not given["tickets"].any(), "the next launch counts from zero"
    return [mx.array(outs[name]).view(mx.bfloat16) for name in kind.outputs]


def _numbers(array: mx.array) -> Any:
    return np.ascontiguousarray(np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array))


def _library(
    kind: Kind,
    tiling: Tiling,
    width: int,
    heads: tuple[tuple[str, int], ...],
    shapes: dict[str, tuple[int, ...]],
    given: dict[str, Any],
    outs: dict[str, Any],
) -> Any:
    types = {"uint8": "unsigned char", "uint16": "Bf16", "int32": "int", "float32": "float", "uint32": "unsigned"}
    names = {name: f"{'const ' * (name in given)}{types[str(each.dtype)]}*" for name, each in (given | outs).items()}
    constants = [("ROWS", width), *tiling.constants, *heads]
    program = [
        _SHIM.replace("SHARED_BYTES", str(tiling.shared_bytes(width))),
        "using T = Bf16;\n",
        *(f"constexpr int {name} = {int(value)};\n" for name, value in constants),
        *(f"static {kind} {name};\n" for name, kind in names.items()),
        *(f"static const int {name}_shape[] = {{{', '.join(map(str, each))}}};\n" for name, each in shapes.items()),
        _without_ptx(matmul_source.HEADER),
        _PACKED_SHIM + _without_ptx(unpack_source(mx.bfloat16) + packed_groups.TAKE) if "scales" in given else "",
        "static Index gridDim;\nstatic void kernel() {\n",
        kind.source(tiling.split > 1, tiling.body).replace(
            "extern __shared__ uint4 ring[];", "uint4* ring = reinterpret_cast<uint4*>(shared_memory);"
        ),
        "}\n",
        f'extern "C" void run({", ".join(f"{kind} {name}_given" for name, kind in names.items())}, int blocks) {{\n',
        *(f"  {name} = {name}_given;\n" for name in names),
        "  gridDim.x = blocks;\n",
        "  for (int block = 0; block < blocks; block++) {\n",
        "    memset(shared_memory, 0xff, sizeof(shared_memory));\n    run_block(block, kernel);\n  }\n}\n",
    ]
    return _compiled("".join(program), tiling.threads)


@functools.cache
def _compiled(program: str, threads: int) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return compile_for_host(program, Path(folder), block_size=threads)


assert warpgroup_source.PIECE == 1024, "tiles are read as pieces of this size"
