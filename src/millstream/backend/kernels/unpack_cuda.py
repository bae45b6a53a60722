"""CUDA source that turns packed weights into pairs of half-precision numbers, in registers.

MLX packs the numbers of a row without gaps, the first in the lowest bits. A lane unpacks eight neighbours at once, into
four registers of two numbers each. Four-bit numbers come out as (0, 4), (1, 5), (2, 6), (3, 7), since that is one mask
per pair; all others in their order. `mill_as_packed` brings eight numbers of the other operand into the same order.
"""

from __future__ import annotations

import mlx.core as mx

from millstream.backend.kernels.weights import PackedForm

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
// A scale or bias, twice, from its bits.
template <int MODE> __device__ __forceinline__ unsigned mill_scale_of(unsigned v) {
  if constexpr (MODE == 0) {
    return v | v << 16;
  } else if constexpr (MODE == 2) {
    return mill_e4m3(v << 8 | v << 24);
  } else {
    if constexpr (MILL_BF16) return v << 7 | v << 23;
    const __half h = __float2half(__uint_as_float(v << 23));
    const unsigned both = *reinterpret_cast<const unsigned short*>(&h);
    return both | both << 16;
  }
}
// The scale or bias at an address, twice.
template <int MODE> __device__ __forceinline__ unsigned mill_scale(const char* at) {
  if constexpr (MODE == 0) return mill_scale_of<MODE>(*reinterpret_cast<const unsigned short*>(at));
  return mill_scale_of<MODE>(*reinterpret_cast<const unsigned char*>(at));
}
template <int BITS> __device__ __forceinline__ uint4 mill_as_packed(uint4 x) {
  if constexpr (BITS != 4) return x;
  return make_uint4(__byte_perm(x.x, x.z, 0x5410), __byte_perm(x.x, x.z, 0x7632),
                    __byte_perm(x.y, x.w, 0x5410), __byte_perm(x.y, x.w, 0x7632));
}
// The other way round.
template <int BITS> __device__ __forceinline__ uint4 mill_in_order(uint4 x) {
  if constexpr (BITS != 4) return x;
  return make_uint4(__byte_perm(x.x, x.y, 0x5410), __byte_perm(x.z, x.w, 0x5410),
                    __byte_perm(x.x, x.y, 0x7632), __byte_perm(x.z, x.w, 0x7632));
}
// Eight numbers from the lowest 8 * BITS bits of two words.
template <int BITS, int MODE> __device__ __forceinline__ void mill_unpack_bits(
    unsigned low, unsigned high, unsigned scale, unsigned bias, unsigned* out) {
  if constexpr (BITS == 4) {
    #pragma unroll
    for (int i = 0; i < 4; i++) {
      const unsigned p = low >> 4 * i;
      if constexpr (MODE == 0) {
        out[i] = mill_fma2(mill_add2(mill_pick(p, 0x000F000Fu, MILL_ONES), MILL_MINUS), scale, bias);
      } else {
        constexpr int UP = MILL_BF16 ? 6 : 9;
        const unsigned q = ((p << 12) & 0x80008000u) | ((p << UP) & (0x00070007u << UP));
        out[i] = mill_mul2(mill_mul2(q, MILL_FP4), scale);
      }
    }
  } else if constexpr (BITS == 8) {
    #pragma unroll
    for (int i = 0; i < 4; i++) {
      const unsigned two = i < 2 ? low : high;
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
    const unsigned long long v = (unsigned long long)high << 32 | low;
    constexpr unsigned MASK = (1u << BITS) - 1;
    #pragma unroll
    for (int i = 0; i < 4; i++) {
      const unsigned one = (unsigned)(v >> 2 * BITS * i) & MASK, two = (unsigned)(v >> (2 * i + 1) * BITS) & MASK;
      out[i] = mill_fma2(mill_add2(one | two << 16 | MILL_ONES, MILL_MINUS), scale, bias);
    }
  }
}
// Eight numbers from BITS bytes.
template <int BITS, int MODE>
__device__ __forceinline__ void mill_unpack(const char* at, unsigned scale, unsigned bias, unsigned* out) {
  if constexpr (BITS == 4) {
    mill_unpack_bits<BITS, MODE>(*reinterpret_cast<const unsigned*>(at), 0u, scale, bias, out);
  } else if constexpr (BITS == 8) {
    const uint2 v = *reinterpret_cast<const uint2*>(at);
    mill_unpack_bits<BITS, MODE>(v.x, v.y, scale, bias, out);
  } else {
    unsigned long long v = 0;
    #pragma unroll
    for (int i = 0; i < BITS; i++) v |= (unsigned long long)*reinterpret_cast<const unsigned char*>(at + i) << 8 * i;
    mill_unpack_bits<BITS, MODE>((unsigned)v, (unsigned)(v >> 32), scale, bias, out);
  }
}
// The eight numbers after `block` times eight of the 32 in BITS words.
template <int BITS, int MODE> __device__ __forceinline__ void mill_unpack_words(
    const unsigned* words, int block, unsigned scale, unsigned bias, unsigned* out) {
  const int word = BITS * block / 4, over = BITS * block % 4 * 8;
  unsigned low = words[word], high = word + 1 < BITS ? words[word + 1] : 0u;
  if (over) {
    const unsigned then = word + 2 < BITS ? words[word + 2] : 0u;
    low = low >> over | high << (32 - over);
    high = high >> over | then << (32 - over);
  }
  mill_unpack_bits<BITS, MODE>(low, high, scale, bias, out);
}
"""


def form_constants(form: PackedForm) -> list[tuple[str, int | bool]]:
    """What every kernel that unpacks is told of a weight."""
    return [("BITS", form.bits), ("GS", form.group_size), ("MODE", MODES[form.mode])]


def unpack_source(dtype: mx.Dtype) -> str:
    """The functions, for numbers of this type."""
    is_bf16 = dtype == mx.bfloat16
    pair = "__nv_bfloat162" if is_bf16 else "__half2"
    return _SOURCE.replace("PAIR", pair).replace("IS_BF16", "true" if is_bf16 else "false")
