"""Routing of a mixture of experts as CUDA kernels: norm, router and choice in one launch; the weighted sum in another.

A block multiplies sixteen rows of the router with eight rows of the batch. The last block to finish for these eight
rows makes their choices, a warp per row: it knows by a counter in memory, which it sets back to zero. MLX does not see
that write, so every layer has a counter of its own, and **a layer is launched once per evaluation**: of two launches
that do not read each other's results MLX may run both at once. They would count together, and leave choices unwritten.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from millstream.backend.kernels import ptx
from millstream.backend.kernels.compiled import cuda_kernel
from millstream.backend.kernels.expert_routing_source import HEADER, WARPS, Routing, route_many_source, route_source

__all__ = ["Routed", "Router", "Routing", "combine", "new_counter", "route", "route_fits", "route_many"]

MAX_SLOTS = 32
"""Experts per row: a lane of a warp holds one."""
MAX_EXPERTS = 1024
ROWS = 8
"""Rows of the batch per block: a column of an mma each, and later a warp each."""

_COMBINE = """
  const int N = y_shape[1], at = (blockIdx.x * blockDim.x + threadIdx.x) * 8, r = at / N;
  if (r >= indices_shape[0]) return;
  const int n = at % N;
  float total[8] = {};
  #pragma unroll
  for (int k = 0; k < TOP; k++) {
    if (indices[r * TOP + k] < 0) continue;
    const float weight = weights[r * TOP + k];
    const uint4 wide = *reinterpret_cast<const uint4*>(y + (size_t)(r * TOP + k) * N + n);
    const T* each = reinterpret_cast<const T*>(&wide);
    #pragma unroll
    for (int j = 0; j < 8; j++) total[j] += weight * float(each[j]);
  }
  #pragma unroll
  for (int j = 0; j < 8; j++) total[j] = float(T(total[j]));
  SHARED
  RESIDUAL
  uint4 result;
  T* each = reinterpret_cast<T*>(&result);
  #pragma unroll
  for (int j = 0; j < 8; j++) each[j] = T(total[j]);
  *reinterpret_cast<uint4*>(out + at) = result;
"""
_ADD = """
  {
    const uint4 wide = *reinterpret_cast<const uint4*>(FROM + at);
    const T* each = reinterpret_cast<const T*>(&wide);
    #pragma unroll
    for (int j = 0; j < 8; j++) total[j] = float(T(total[j] + VALUE));
  }
"""


@functools.cache
def _route_kernel(
    routing: Routing,
    eps: float | None,
    biased: bool,
    corrected: bool,
    gated: bool,
    live: bool,
    dtype: mx.Dtype,
    many: bool = False,
) -> Any:
    inputs = ["x", "router"] + ([] if many else ["count"])
    inputs += ["norm"] if eps is not None else []
    inputs += ["bias"] if biased else []
    inputs += ["correction"] if corrected else []
    inputs += ["live"] if live else []
    outputs = ["indices", "weights"] + ([] if many else ["logits"])
    outputs += ["normed"] if eps is not None else []
    outputs += ["shared_weight"] if gated else []
    source = route_many_source if many else route_source
    return cuda_kernel(
        name="millstream_route_many" if many else "millstream_route",
        input_names=inputs,
        output_names=outputs,
        source=source(routing, eps, biased, corrected, gated, live),
        header=ptx.mma(dtype == mx.float16) + HEADER,
    )


@dataclass(frozen=True, slots=True)
class Router:
    """The arrays of a router. Its weight's last row is the gate of a shared expert, if it has one more row than there
    are experts."""

    weight: mx.array
    count: mx.array
    """Zeros, int32, one for each eight rows of a batch; of this layer alone, and of one launch at a time."""
    bias: mx.array | None = None
    correction: mx.array | None = None
    """Added to the scores by which experts are chosen, but not to their weights."""


def new_counter(rows: int) -> mx.array:
    return mx.zeros(((rows + ROWS - 1) // ROWS,), dtype=mx.int32)


def route_fits(router: Router, routing: Routing, dtype: mx.Dtype) -> bool:
    """True if the kernel can take this router, for rows of this type."""
    return (
        router.weight.dtype == dtype
        and dtype in (mx.bfloat16, mx.float16)
        and router.weight.shape[1] % 32 == 0
        and routing.slots <= min(MAX_SLOTS, routing.experts)
        and routing.experts <= MAX_EXPERTS
        and routing.groups <= 32
        and routing.experts % routing.groups == 0
        and (routing.groups == 1 or routing.experts <= 512)
    )


@dataclass(frozen=True, slots=True)
class Routed:
    """What was chosen for each row."""

    x: mx.array
    """The rows, normed if that was asked for."""
    indices: mx.array
    """(rows, slots), int32; -1 for rows that nobody reads."""
    weights: mx.array
    """(rows, slots), float32."""
    shared: mx.array | None = None
    """The shared expert's weight for each row, float32."""


def route(
    x: mx.array,
    router: Router,
    routing: Routing,
    norm: tuple[mx.array, float] | None = None,
    live: mx.array | None = None,
) -> Routed:
    """Choose experts for x of (rows, …, size), after an RMS norm if given: its weight and epsilon. Rows where `live` is
    negative get none."""
    rows = x.shape[0]
    outputs = router.weight.shape[0]
    gated = outputs > routing.experts
    eps = None if norm is None else norm[1]
    kernel = _route_kernel(
        routing, eps, router.bias is not None, router.correction is not None, gated, live is not None, x.dtype
    )
    inputs = [x, router.weight, router.count]
    inputs += [] if norm is None else [norm[0]]
    inputs += [array for array in (router.bias, router.correction, live) if array is not None]
    shapes: list[tuple[int, ...]] = [(rows, routing.slots), (rows, routing.slots), (rows, outputs)]
    dtypes = [mx.int32, mx.float32, mx.float32]
    if norm is not None:
        shapes.append(x.shape)
        dtypes.append(x.dtype)
    if gated:
        shapes.append((rows,))
        dtypes.append(mx.float32)
    out: list[mx.array] = kernel(
        inputs=inputs,
        output_shapes=shapes,
        output_dtypes=dtypes,
        grid=((outputs + 15) // 16 * WARPS * 32, (rows + ROWS - 1) // ROWS, 1),
        threadgroup=(WARPS * 32, 1, 1),
        template=[("T", x.dtype), ("E", routing.experts), ("TOP", routing.slots)],
    )
    return Routed(x if norm is None else out[3], out[0], out[1], out[-1] if gated else None)


def route_many(
    x: mx.array,
    router: Router,
    routing: Routing,
    norm: tuple[mx.array, float] | None = None,
    live: mx.array | None = None,
) -> Routed:
    """As `route`, for x of (rows, size): as many rows as there are, and several launches of a layer may run at once."""
    rows, outputs = x.shape[0], router.weight.shape[0]
    gated = outputs > routing.experts
    eps = None if norm is None else norm[1]
    biased, corrected = router.bias is not None, router.correction is not None
    kernel = _route_kernel(routing, eps, biased, corrected, gated, live is not None, x.dtype, many=True)
    inputs = [x, router.weight] + ([] if norm is None else [norm[0]])
    inputs += [array for array in (router.bias, router.correction, live) if array is not None]
    out: list[mx.array] = kernel(
        inputs=inputs,
        output_shapes=[(rows, routing.slots)] * 2 + [x.shape] * (norm is not None) + [(rows,)] * gated,
        output_dtypes=[mx.int32, mx.float32] + [x.dtype] * (norm is not None) + [mx.float32] * gated,
        grid=((rows + ROWS - 1) // ROWS * WARPS * 32, 1, 1),
        threadgroup=(WARPS * 32, 1, 1),
        template=[("T", x.dtype), ("E", routing.experts), ("TOP", routing.slots), ("OUTPUTS", outputs)],
    )
    return Routed(x if norm is None else out[2], out[0], out[1], out[-1] if gated else None)


@functools.cache
def _combine_kernel(residual: bool, shared: bool, gated: bool) -> Any:
    source = _COMBINE.replace(
        "RESIDUAL", _ADD.replace("FROM", "residual").replace("VALUE", "float(each[j])") if residual else ""
    )
    value = "float(T(gate[r] * float(each[j])))" if gated else "float(each[j])"
    source = source.replace("SHARED", _ADD.replace("FROM", "shared_out").replace("VALUE", value) if shared else "")
    inputs = ["y", "indices", "weights"]
    inputs += ["shared_out"] if shared else []
    inputs += ["gate"] if gated else []
    inputs += ["residual"] if residual else []
    return cuda_kernel(name="millstream_combine", input_names=inputs, output_names=["out"], source=source, header="")


def combine(y: mx.array, routed: Routed, shared: mx.array | None = None, residual: mx.array | None = None) -> mx.array:
    """The weighted sum over each row's experts, in the row's own order, plus the shared expert's output and the
    residual: like the routed rows, from y of (rows x slots, size)."""
    rows, slots = routed.indices.shape
    size = y.shape[1]
    gate = routed.shared if shared is not None else None
    inputs = [y, routed.indices, routed.weights]
    inputs += [array for array in (shared, gate, residual) if array is not None]
    out: mx.array = _combine_kernel(residual is not None, shared is not None, gate is not None)(
        inputs=inputs,
        output_shapes=[routed.x.shape],
        output_dtypes=[y.dtype],
        grid=((rows * size // 8 + 127) // 128 * 128, 1, 1),
        threadgroup=(128, 1, 1),
        template=[("T", y.dtype), ("TOP", slots)],
    )[0]
    return out
