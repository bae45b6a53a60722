"""The CUDA source of routing: `expert_routing` launches it, and says how its blocks share rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WARPS = 8
"""Of a block."""


@dataclass(frozen=True, slots=True)
class Routing:
    """How a row's experts follow from the router's logits."""

    experts: int
    slots: int
    """Experts per row."""
    score: Literal["softmax", "sigmoid", "softmax_chosen"]
    """Scores by softmax over all experts, by sigmoid, or by softmax over the chosen ones."""
    normalised: bool = False
    """Divide the chosen scores by their sum plus `epsilon`."""
    epsilon: float = 0.0
    scale: float = 1.0
    groups: int = 1
    best_groups: int = 1
    """Only experts of so many groups may be chosen."""
    group_score: Literal["max", "best_two"] = "max"
    """A group's score: its best expert's, or the sum of its two best ones'."""


HEADER = """
__device__ __forceinline__ float mill_warp_sum(float value) {
  for (int o = 16; o > 0; o /= 2) value += __shfl_xor_sync(0xffffffffu, value, o);
  return value;
}
__device__ __forceinline__ float mill_warp_max(float value) {
  for (int o = 16; o > 0; o /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, o));
  return value;
}
"""

# A warp's chunks of 32 numbers alternate with the other warps'. FLIGHT of them are loaded at once, the first ones
# before the rows' norm is known: the router and the norm's weight come from memory, since a step reads more than caches
# hold.
_LOGITS = """
  constexpr int FLIGHT = 8, LINE = 17;
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4;
  const int R = x_shape[0], K = router_shape[1], first = blockIdx.y * 8, e0 = blockIdx.x * 16, chunks = K / 32;
  const int outputs = router_shape[0];
  __shared__ float sums[WARPS * 8 * LINE];
  __shared__ bool last;
  const T* xr = x + (size_t)min(first + g, R - 1) * K + t * 8;
  float acc[4] = {};
  const T* one = router + (size_t)min(e0 + g, outputs - 1) * K + t * 8;
  const T* two = router + (size_t)min(e0 + g + 8, outputs - 1) * K + t * 8;
  uint4 a[FLIGHT][2], b[FLIGHT];
  NORM_FLIGHT
  auto load = [&](int c) {
    #pragma unroll
    for (int f = 0; f < FLIGHT; f++) {
      const int k = (c + f * WARPS) * 32;
      if (k >= K) break;
      a[f][0] = *reinterpret_cast<const uint4*>(one + k);
      a[f][1] = *reinterpret_cast<const uint4*>(two + k);
      b[f] = *reinterpret_cast<const uint4*>(xr + k);
      NORM_LOAD
    }
  };
  load(warp);
  INVERSE
  for (int c = warp; c < chunks; c += WARPS * FLIGHT) {
    if (c > warp) load(c);
    #pragma unroll
    for (int f = 0; f < FLIGHT; f++) {
      const int k = (c + f * WARPS) * 32;
      if (k >= K) break;
      NORMED
      mill_mma(acc, a[f][0].x, a[f][1].x, a[f][0].y, a[f][1].y, b[f].x, b[f].y);
      mill_mma(acc, a[f][0].z, a[f][1].z, a[f][0].w, a[f][1].w, b[f].z, b[f].w);
    }
  }
  #pragma unroll
  for (int c = 0; c < 4; c++) sums[(warp * 8 + t * 2 + c % 2) * LINE + g + c / 2 * 8] = acc[c];
  __syncthreads();
  if (tid < 128) {
    const int col = tid / 16, row = tid % 16;
    float total = 0.f;
    #pragma unroll
    for (int v = 0; v < WARPS; v++) total += sums[(v * 8 + col) * LINE + row];
    total = float(T(total));
    if (e0 + row < outputs && first + col < R) {
      ROUTER_BIAS
      logits[(size_t)(first + col) * outputs + e0 + row] = total;
    }
  }
  __threadfence();
  __syncthreads();
  if (tid == 0) {
    int* counter = const_cast<int*>(count) + blockIdx.y;
    last = atomicAdd(counter, 1) == gridDim.x - 1;
    if (last) *counter = 0;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  const int r = first + warp;
  if (r >= R) return;
  const float* logit = logits + (size_t)r * outputs;
"""
# Of many rows a block takes eight, with all experts: nothing is counted, so launches of a layer may run at once. Sums
# are made in the same order.
_MANY_LOGITS = """
  constexpr int FLIGHT = 2, LINE = 17, NEEDED = (OUTPUTS + 15) / 16, MOST = OUTPUTS > 384 ? 2 : 4;
  constexpr int TILES = NEEDED < MOST ? NEEDED : MOST;  // so that all fits into 48 KiB
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4;
  const int R = x_shape[0], K = router_shape[1], first = blockIdx.x * 8, chunks = K / 32;
  __shared__ float sums[TILES * WARPS * 8 * LINE], logits[8 * OUTPUTS];
  const T* xr = x + (size_t)min(first + g, R - 1) * K + t * 8;
  INVERSE
  for (int e0 = 0; e0 < OUTPUTS; e0 += 16 * TILES) {
    float acc[TILES][4] = {};
    for (int c = warp; c < chunks; c += WARPS * FLIGHT) {
      uint4 a[FLIGHT][TILES][2], b[FLIGHT];
      NORM_FLIGHT
      #pragma unroll
      for (int f = 0; f < FLIGHT; f++) {
        const int k = (c + f * WARPS) * 32;
        if (k >= K) break;
        b[f] = *reinterpret_cast<const uint4*>(xr + k);
        NORM_LOAD
        #pragma unroll
        for (int i = 0; i < TILES * 2; i++) {
          const int e = min(e0 + i * 8 + g, OUTPUTS - 1);
          a[f][i / 2][i % 2] = *reinterpret_cast<const uint4*>(router + (size_t)e * K + t * 8 + k);
        }
      }
      #pragma unroll
      for (int f = 0; f < FLIGHT; f++) {
        const int k = (c + f * WARPS) * 32;
        if (k >= K) break;
        NORMED
        #pragma unroll
        for (int i = 0; i < TILES; i++) {
          const uint4 *u = a[f][i];
          mill_mma(acc[i], u[0].x, u[1].x, u[0].y, u[1].y, b[f].x, b[f].y);
          mill_mma(acc[i], u[0].z, u[1].z, u[0].w, u[1].w, b[f].z, b[f].w);
        }
      }
    }
    #pragma unroll
    for (int i = 0; i < TILES; i++)
      #pragma unroll
      for (int c = 0; c < 4; c++) sums[((i * WARPS + warp) * 8 + t * 2 + c % 2) * LINE + g + c / 2 * 8] = acc[i][c];
    __syncthreads();
    for (int i = tid; i < TILES * 128; i += WARPS * 32) {
      const int tile = i / 128, col = i / 16 % 8, row = i % 16, e = e0 + tile * 16 + row;
      float total = 0.f;
      #pragma unroll
      for (int v = 0; v < WARPS; v++) total += sums[((tile * WARPS + v) * 8 + col) * LINE + row];
      total = float(T(total));
      if (e < OUTPUTS) {
        ROUTER_BIAS
        logits[col * OUTPUTS + e] = total;
      }
    }
    __syncthreads();
  }
  const int r = first + warp;
  if (r >= R) return;
  const float* logit = logits + warp * OUTPUTS;
"""
_INVERSE = """
  __shared__ float inverse[8];
  if (first + warp < R) {
    const T* xw = x + (size_t)(first + warp) * K;
    float squares = 0.f;
    for (int k = lane * 8; k < K; k += 256) {
      const uint4 eight = *reinterpret_cast<const uint4*>(xw + k);
      const T* each = reinterpret_cast<const T*>(&eight);
      #pragma unroll
      for (int j = 0; j < 8; j++) squares += float(each[j]) * float(each[j]);
    }
    squares = mill_warp_sum(squares);
    if (lane == 0) inverse[warp] = rsqrtf(squares / K + EPS);
  }
  __syncthreads();
  const float inv = inverse[min(g, R - 1 - first)];
"""
_NORMED = """
      {
        const T* scales = reinterpret_cast<const T*>(&wide[f]);
        T* each = reinterpret_cast<T*>(&b[f]);
        #pragma unroll
        for (int j = 0; j < 8; j++) each[j] = T(float(T(float(each[j]) * inv)) * float(scales[j]));
        if (WRITES && first + g < R)
          *reinterpret_cast<uint4*>(normed + (size_t)(first + g) * K + k + t * 8) = b[f];
      }
"""
_NORM_LOAD = "wide[f] = *reinterpret_cast<const uint4*>(norm + k + t * 8);"
_ROUTER_BIAS = "if (e0 + row < E) total = float(T(total + float(bias[e0 + row])));"

_CHOOSE = """
  constexpr int V = (E + 31) / 32;
  constexpr float LOW = -3.402823466e38f;
  float score[V], key[V];
  float top = LOW;
  #pragma unroll
  for (int v = 0; v < V; v++) {
    score[v] = v * 32 + lane < E ? READ(logit + v * 32 + lane) : LOW;
    top = fmaxf(top, score[v]);
  }
  SCORE
  #pragma unroll
  for (int v = 0; v < V; v++) {
    key[v] = score[v];
    CORRECTION
  }
  GROUPED
  int chosen = 0;
  float weight = 0.f;
  unsigned taken = 0;
  for (int k = 0; k < TOP; k++) {
    float best = 0.f;
    int at = 1 << 20;
    #pragma unroll
    for (int v = 0; v < V; v++)
      if (v * 32 + lane < E && !(taken >> v & 1) && (at == 1 << 20 || key[v] > best)) {
        best = key[v];
        at = v * 32 + lane;
      }
    for (int o = 16; o > 0; o /= 2) {
      const float other = __shfl_xor_sync(0xffffffffu, best, o);
      const int other_at = __shfl_xor_sync(0xffffffffu, at, o);
      const bool better = at == 1 << 20 || other > best || (other == best && other_at < at);
      if (other_at != 1 << 20 && better) { best = other; at = other_at; }
    }
    at = __shfl_sync(0xffffffffu, at, 0);
    float found = 0.f;
    #pragma unroll
    for (int v = 0; v < V; v++)
      if (at / 32 == v) found = score[v];
    found = __shfl_sync(0xffffffffu, found, at % 32);
    if (at % 32 == lane) taken |= 1u << (at / 32);
    if (lane == k) { chosen = at; weight = found; }
  }
  WEIGHTS
  if (lane < TOP) {
    indices[(size_t)r * TOP + lane] = LIVE ? chosen : -1;
    weights[(size_t)r * TOP + lane] = weight * SCALE;
  }
  SHARED_GATE
"""
_SCORES = {
    "softmax": """
  top = mill_warp_max(top);
  float all = 0.f;
  #pragma unroll
  for (int v = 0; v < V; v++) {
    score[v] = v * 32 + lane < E ? expf(score[v] - top) : 0.f;
    all += score[v];
  }
  all = mill_warp_sum(all);
  #pragma unroll
  for (int v = 0; v < V; v++) score[v] /= all;
""",
    "sigmoid": """
  #pragma unroll
  for (int v = 0; v < V; v++) score[v] = 1.f / (1.f + expf(-score[v]));
""",
    "softmax_chosen": "",
}
_CORRECTION = "if (v * 32 + lane < E) key[v] += float(correction[v * 32 + lane]);"
_GROUPED = """
  {
    constexpr int SIZE = E / GROUPS;
    __shared__ float keys[8][E];
    #pragma unroll
    for (int v = 0; v < V; v++)
      if (v * 32 + lane < E) keys[warp][v * 32 + lane] = key[v];
    __syncwarp();
    float best = LOW, second = LOW;
    if (lane < GROUPS)
      for (int j = 0; j < SIZE; j++) {
        const float each = keys[warp][lane * SIZE + j];
        second = fmaxf(second, fminf(best, each));
        best = fmaxf(best, each);
      }
    const float group = GROUP_SCORE;
    int rank = 0;
    for (int j = 0; j < GROUPS; j++) {
      const float other = __shfl_sync(0xffffffffu, group, j);
      rank += other > group || (other == group && j < lane);
    }
    const unsigned kept = __ballot_sync(0xffffffffu, lane < GROUPS && rank < BEST_GROUPS);
    #pragma unroll
    for (int v = 0; v < V; v++)
      if (v * 32 + lane < E && !(kept >> ((v * 32 + lane) / SIZE) & 1)) key[v] = 0.f;
  }
"""
_SOFTMAX_CHOSEN = """
  {
    const float most = mill_warp_max(lane < TOP ? weight : LOW);
    weight = lane < TOP ? expf(weight - most) : 0.f;
    weight /= mill_warp_sum(weight);
  }
"""
_NORMALISED = "weight /= mill_warp_sum(lane < TOP ? weight : 0.f) + EPSILON;"
_SHARED_GATE = """
  if (lane == 0) shared_weight[r] = 1.f / (1.f + expf(-READ(logit + E)));
"""


def _with_norm(source: str, eps: float | None, writes: str) -> str:
    """`writes`: which blocks write the normed rows, and when."""
    source = source.replace("INVERSE", "" if eps is None else _INVERSE.replace("EPS", f"{eps!r}f"), 1)
    source = source.replace("NORMED", "" if eps is None else _NORMED.replace("WRITES", writes))
    source = source.replace("NORM_FLIGHT", "" if eps is None else "uint4 wide[FLIGHT];")
    return source.replace("NORM_LOAD", "" if eps is None else _NORM_LOAD)


def route_source(routing: Routing, eps: float | None, biased: bool, corrected: bool, gated: bool, live: bool) -> str:
    logits = _with_norm(_LOGITS, eps, "blockIdx.x == 0").replace("ROUTER_BIAS", _ROUTER_BIAS if biased else "")
    return (logits + _choose_source(routing, corrected, gated, live, "__ldcg")).replace("WARPS", str(WARPS))


def _choose_source(routing: Routing, corrected: bool, gated: bool, live: bool, read: str) -> str:
    grouped = ""
    if routing.groups > 1:
        grouped = _GROUPED.replace("GROUP_SCORE", "best + second" if routing.group_score == "best_two" else "best")
        grouped = grouped.replace("BEST_GROUPS", str(routing.best_groups)).replace("GROUPS", str(routing.groups))
    weights = _SOFTMAX_CHOSEN if routing.score == "softmax_chosen" else ""
    if routing.normalised:
        weights += _NORMALISED.replace("EPSILON", f"{routing.epsilon!r}f")
    choose = _CHOOSE.replace("SHARED_GATE", _SHARED_GATE if gated else "").replace("WEIGHTS", weights)
    choose = choose.replace("GROUPED", grouped).replace("CORRECTION", _CORRECTION if corrected else "")
    choose = choose.replace("SCALE", f"{routing.scale!r}f").replace("LIVE", "live[r] >= 0" if live else "true")
    return choose.replace("SCORE", _SCORES[routing.score]).replace("READ", read)


def route_many_source(
    routing: Routing, eps: float | None, biased: bool, corrected: bool, gated: bool, live: bool
) -> str:
    logits = _with_norm(_MANY_LOGITS, eps, "e0 == 0")
    logits = logits.replace("ROUTER_BIAS", _ROUTER_BIAS.replace("e0 + row", "e") if biased else "")
    return (logits + _choose_source(routing, corrected, gated, live, "*")).replace("WARPS", str(WARPS))
