"""Decode attention over packed slabs: what stands between the parts of `decode_source`."""

from __future__ import annotations

# MLX's affine form: a number is scale * code + bias. The codes go through the mma as they are, scales and biases are
# applied to sums: to the scores of a key, and to the weights before they meet the values. Codes are exact in half
# precision, which the mma has whatever the type of the model is. VFACTOR keeps weights away from its smallest numbers.
QUERY = """
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
WRITE = """
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

LOOP = """
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
