"""CUDA source that turns packed weights into pairs of half-precision numbers, in registers.

MLX packs the numbers of a row without gaps, the first in the lowest bits. A lane unpacks eight neighbours at once, into
four registers of two numbers each. Four-bit numbers come out as (0, 4), (1, 5), (2, 6), (3, 7), since that is one mask
per pair; all others in their order. `mill_as_packed` brings eight numbers of the other operand into the same order.
"""

from __future__ import annotations

import mlx.core as mx

MODES = {"affine": 0, "mxfp4": 1, "nvfp4": 2, "mxfp8": 3}
"""The modes of `mx.quantize`, as the template argument MODE."""

_SOURCE = """
__device__ __forceinline__ unsigned mill_fma2(unsigned a, unsigned b, unsigned c) {
  const PAIR r = __hfma2(*reinterpret_cast<PAIR*>(&a), *reinterpret_cast<PAIR*>(&b), *reinterpret_cast<PAIR*>(&c));
  return *reinterpret_cast<const unsigned*>(&r);
}
__device__ __forceinline__ unsigned mill_mul2(unsigned a, unsigned b) {
  const PAIR r = __hmul2(*reinterpret_cast<PAIR*>(&a), *reinterpret_cast<PAIR*>(&b));
  return *reinterpret_cast<const unsigned*>(&r);
}
__device__ __forceinline__ unsigned mill_add2(unsigned a, unsigned b) {
  const PAIR r = __hadd2(*reinterpret_cast<PAIR*>(&a), *reinterpret_cast<PAIR*>(&b));
  return *reinterpret_cast<const unsigned*>(&r);
}
// (v & mask) | bits in one instruction: the compiler makes two of it.
__device__ __forceinline__ unsigned mill_pick(unsigned v, unsigned mask, unsigned bits) {
  unsigned r;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(v), "r"(mask), "r"(bits));
  return r;
}
// The lowest bits of MILL_ONES count its ones: to put a small integer there is to add it.
constexpr bool MILL_BF16 = IS_BF16;
constexpr unsigned MILL_ONES = MILL_BF16 ? 0x43004300u : 0x64006400u;   // 128, 1024
constexpr unsigned MILL_MINUS = MILL_BF16 ? 0xC300C300u : 0xE400E400u;
constexpr unsigned MILL_FP4 = MILL_BF16 ? 0x7E807E80u : 0x74007400u;    // 2^126, 2^14: what the exponents differ by
constexpr unsigned MILL_FP8 = MILL_BF16 ? 0x7B807B80u : 0x5C005C00u;    // 2^120, 2^8

// A pair of e4m3 numbers that stand in the high byte of each half.
__device__ __forceinline__ unsigned mill_e4m3(unsigned v) {
  return mill_mul2((v & 0x80008000u) | ((v & 0x7F007F00u) >> (MILL_BF16 ? 4 : 1)), MILL_FP8);
}
// The scale or bias at an address, twice.
template <int MODE> __device__ __forceinline__ unsigned mill_scale(const char* at) {
  if constexpr (MODE == 0) {
    const unsigned v = *reinterpret_cast<const unsigned short*>(at);
    return v | v << 16;
  } else if constexpr (MODE == 2) {
    const unsigned v = *reinterpret_cast<const unsigned char*>(at);
    return mill_e4m3(v << 8 | v << 24);
  } else {
    const unsigned e = *reinterpret_cast<const unsigned char*>(at);
    if constexpr (MILL_BF16) return e << 7 | e << 23;
    const __half h = __float2half(__uint_as_float(e << 23));
    const unsigned v = *reinterpret_cast<const unsigned short*>(&h);
    return v | v << 16;
  }
}
template <int BITS> __device__ __forceinline__ uint4 mill_as_packed(uint4 x) {
  if constexpr (BITS != 4) return x;
  return make_uint4(__byte_perm(x.x, x.z, 0x5410), __byte_perm(x.x, x.z, 0x7632),
                    __byte_perm(x.y, x.w, 0x5410), __byte_perm(x.y, x.w, 0x7632));
}
// Eight numbers from BITS bytes.
template <int BITS, int MODE>
__device__ __forceinline__ void mill_unpack(const char* at, unsigned scale, unsigned bias, unsigned* out) {
  if constexpr (BITS == 4) {
    const unsigned v = *reinterpret_cast<const unsigned*>(at);
    #pragma unroll
    for (int i = 0; i < 4; i++) {
      const unsigned p = v >> 4 * i;
      if constexpr (MODE == 0) {
        out[i] = mill_fma2(mill_add2(mill_pick(p, 0x000F000Fu, MILL_ONES), MILL_MINUS), scale, bias);
      } else {
        constexpr int UP = MILL_BF16 ? 6 : 9;
        const unsigned q = ((p << 12) & 0x80008000u) | ((p << UP) & (0x00070007u << UP));
        out[i] = mill_mul2(mill_mul2(q, MILL_FP4), scale);
      }
    }
  } else if constexpr (BITS == 8) {
    const uint2 v = *reinterpret_cast<const uint2*>(at);
    #pragma unroll
    for (int i = 0; i < 4; i++) {
      const unsigned two = i < 2 ? v.x : v.y;
      if constexpr (MODE == 0 && MILL_BF16) {
        const unsigned p = __byte_perm(two, 0, i % 2 ? 0x4342 : 0x4140);
        // 128 more than the lower seven bits; less 128 unless the eighth is set.
        const unsigned less = (~p & 0x00800080u) * 0x186u;  // 0xC300, -128, or 0
        out[i] = mill_fma2(mill_add2((p & 0x007F007Fu) | MILL_ONES, less), scale, bias);
      } else if constexpr (MODE == 0) {
        const unsigned p = __byte_perm(two, MILL_ONES, i % 2 ? 0x7352 : 0x7150);
        out[i] = mill_fma2(mill_add2(p, MILL_MINUS), scale, bias);
      } else {
        out[i] = mill_mul2(mill_e4m3(__byte_perm(two, 0, i % 2 ? 0x3424 : 0x1404)), scale);
      }
    }
  } else {
    unsigned long long v = 0;
    #pragma unroll
    for (int i = 0; i < BITS; i++) v |= (unsigned long long)*reinterpret_cast<const unsigned char*>(at + i) << 8 * i;
    constexpr unsigned MASK = (1u << BITS) - 1;
    #pragma unroll
    for (int i = 0; i < 4; i++) {
      const unsigned one = (unsigned)(v >> 2 * BITS * i) & MASK, two = (unsigned)(v >> (2 * i + 1) * BITS) & MASK;
      out[i] = mill_fma2(mill_add2(one | two << 16 | MILL_ONES, MILL_MINUS), scale, bias);
    }
  }
}
"""


def unpack_source(dtype: mx.Dtype) -> str:
    """The functions, for numbers of this type."""
    is_bf16 = dtype == mx.bfloat16
    pair = "__nv_bfloat162" if is_bf16 else "__half2"
    return _SOURCE.replace("PAIR", pair).replace("IS_BF16", "true" if is_bf16 else "false")
