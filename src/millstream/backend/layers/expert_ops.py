"""Mixtures of experts: CUDA kernels and their MLX reference, behind one interface."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from millstream.backend.kernels import expert_matmul, expert_routing, expert_tiles
from millstream.backend.kernels.expert_matmul import Activation, ExpertWeights, Packing
from millstream.backend.kernels.expert_routing import Routed, Router, Routing
from millstream.backend.kernels.small_matmul import WIDTHS

Norm = tuple[mx.array, float]
"""The weight and epsilon of an RMS norm."""


@dataclass(frozen=True, slots=True)
class ExpertOps:
    """The steps of a mixture, by one implementation. Rows are (rows, …, size); what experts compute is (rows x slots,
    size)."""

    fits: Callable[[ExpertWeights, mx.Dtype], bool]
    route_fits: Callable[[Router, Routing, mx.Dtype], bool]
    route: Callable[[mx.array, Router, Routing, Norm | None, mx.array | None], Routed]
    glu: Callable[[mx.array, mx.array, ExpertWeights, ExpertWeights, Activation], mx.array]
    down: Callable[[mx.array, mx.array, ExpertWeights], mx.array]
    combine: Callable[[mx.array, Routed, mx.array | None, mx.array | None], mx.array]
    route_many: Callable[[mx.array, Router, Routing, Norm | None, mx.array | None], Routed]
    """As `route`, for as many rows as a prefill pass has; several launches of a layer may run at once."""
    many: Callable[[mx.array, mx.array, ExpertWeights, ExpertWeights, ExpertWeights, Activation], mx.array]
    """`glu` and `down` for as many rows as a prefill pass has."""
    compile: Callable[[Any], Any]


def route(
    x: mx.array, router: Router, routing: Routing, norm: Norm | None = None, live: mx.array | None = None
) -> Routed:
    """See `expert_routing.route`. Scores are computed in float32, from logits in the type of the model."""
    if norm is not None:
        x = mx.fast.rms_norm(x, norm[0], norm[1])
    logits = x.reshape(x.shape[0], -1) @ router.weight.T
    shared = None
    if router.weight.shape[0] > routing.experts:
        logits, last = mx.split(logits, [routing.experts], axis=-1)
        shared = mx.sigmoid(last[:, 0].astype(mx.float32))
    if router.bias is not None:
        logits = logits + router.bias
    logits = logits.astype(mx.float32)
    if routing.score == "softmax":
        scores = mx.softmax(logits, axis=-1)
    else:
        scores = mx.sigmoid(logits) if routing.score == "sigmoid" else logits
    keys = scores if router.correction is None else scores + router.correction
    if routing.groups > 1:
        keys = _best_groups(keys, routing)
    slots = routing.slots
    indices = mx.argpartition(-keys, kth=slots - 1, axis=-1)[:, :slots].astype(mx.int32)
    weights = mx.take_along_axis(scores, indices, axis=-1)
    if routing.score == "softmax_chosen":
        weights = mx.softmax(weights, axis=-1)
    if routing.normalised:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    if live is not None:
        indices = mx.where(live[:, None] >= 0, indices, -1)
    return Routed(x, indices, weights * routing.scale, shared)


def _best_groups(keys: mx.array, routing: Routing) -> mx.array:
    """Zeros for experts outside of the best groups."""
    grouped = keys.reshape(keys.shape[0], routing.groups, -1)
    best = mx.topk(grouped, 2 if routing.group_score == "best_two" else 1, axis=-1).sum(axis=-1)
    order = mx.argsort(mx.argsort(-best, axis=-1), axis=-1)
    return mx.where(order[..., None] < routing.best_groups, grouped, 0.0).reshape(keys.shape)


def glu(x: mx.array, indices: mx.array, gate: ExpertWeights, up: ExpertWeights, activation: Activation) -> mx.array:
    """See `expert_matmul.expert_glu`."""
    rows = x.reshape(x.shape[0], 1, 1, -1)
    gates, ups = (_product(rows, indices, weights) for weights in (gate, up))
    return activate(activation, gates, ups)


def activate(activation: Activation, gate: mx.array, up: mx.array) -> mx.array:
    if activation.kind == "clipped":
        gate, up = mx.minimum(gate, activation.limit), mx.clip(up, -activation.limit, activation.limit)
        return gate * mx.sigmoid(activation.alpha * gate) * (up + 1)
    out: mx.array = (nn.silu(gate) if activation.kind == "silu" else nn.gelu_approx(gate)) * up
    return out


def down(h: mx.array, indices: mx.array, weights: ExpertWeights) -> mx.array:
    """See `expert_matmul.expert_down`."""
    return _product(h.reshape(*indices.shape, 1, -1), indices, weights)


def _product(x: mx.array, indices: mx.array, weights: ExpertWeights) -> mx.array:
    """Rows whose index is -1 get some expert's numbers: nobody reads them."""
    chosen = mx.maximum(indices, 0)
    dtype, packing = x.dtype, weights.packing
    if packing is None:
        # On the CPU experts are in float32, whatever the type of the model.
        weight = weights.arrays[0]
        out = mx.gather_mm(x.astype(weight.dtype), weight.swapaxes(-1, -2), rhs_indices=chosen).astype(dtype)
    else:
        packed, scales, *biases = weights.arrays
        out = mx.gather_qmm(
            x,
            packed,
            scales,
            biases[0] if biases else None,
            rhs_indices=chosen,
            transpose=True,
            group_size=packing.group_size,
            bits=packing.bits,
            mode=packing.mode,
        )
    if weights.bias is not None:
        out = out + mx.expand_dims(weights.bias[chosen], -2)
    return out.reshape(indices.size, -1).astype(dtype)


def many(
    x: mx.array,
    indices: mx.array,
    gate: ExpertWeights,
    up: ExpertWeights,
    last: ExpertWeights,
    activation: Activation,
) -> mx.array:
    """See `many_by_kernels`."""
    return down(glu(x, indices, gate, up, activation), indices, last)


def many_by_kernels(
    x: mx.array,
    indices: mx.array,
    gate: ExpertWeights,
    up: ExpertWeights,
    last: ExpertWeights,
    activation: Activation,
) -> mx.array:
    """What each row's experts compute: (rows x slots, size) from x of (rows, size). More rows than a decode step's go
    through tiles of each expert's rows, and through the kernels of a step in parts if the weights are packed."""
    rows = x.shape[0]
    if rows > WIDTHS[-1] and all(expert_tiles.fits(weights, x.dtype) for weights in (gate, up, last)):
        choices = expert_tiles.sort_choices(indices, gate.experts)
        return expert_tiles.tiled_down(expert_tiles.tiled_glu(x, choices, gate, up, activation), choices, last)
    out = []
    for first in range(0, rows, expert_matmul.MAX_ROWS):
        part = slice(first, first + expert_matmul.MAX_ROWS)
        h = expert_matmul.expert_glu(x[part], indices[part], gate, up, activation)
        out.append(expert_matmul.expert_down(h, indices[part], last))
    return out[0] if len(out) == 1 else mx.concatenate(out)


def combine(y: mx.array, routed: Routed, shared: mx.array | None = None, residual: mx.array | None = None) -> mx.array:
    """See `expert_routing.combine`."""
    weights = mx.where(routed.indices < 0, 0.0, routed.weights)
    rows = weights.shape[0]
    out = (y.reshape(rows, weights.shape[1], -1) * weights[..., None]).sum(axis=1).astype(y.dtype)
    out = out.reshape(routed.x.shape)
    if shared is not None:
        gate = 1.0 if routed.shared is None else routed.shared.reshape(rows, *[1] * (out.ndim - 1))
        out = out + (shared * gate).astype(out.dtype)
    return out if residual is None else residual + out


def expert_weights(layer: Any) -> ExpertWeights | None:
    """The weights of one projection of experts; None if they are of another kind."""
    bias = layer.get("bias")
    if isinstance(layer, QuantizedSwitchLinear) and layer.get("global_scale") is None:
        arrays = (layer["weight"], layer["scales"], layer.get("biases"))
        packing = Packing(layer.bits, layer.group_size, layer.mode)
        return ExpertWeights(tuple(array for array in arrays if array is not None), packing, bias)
    return ExpertWeights((layer["weight"],), None, bias) if isinstance(layer, SwitchLinear) else None


def experts_stay_packed(layer: Any) -> bool:
    """True if the kernels compute with a packed layer of experts as it is."""
    weights = expert_weights(layer)
    if weights is None or weights.packing is None:
        return False
    dtype = weights.arrays[1].dtype if weights.packing.mode == "affine" else mx.bfloat16
    return expert_matmul.fits(weights, dtype if weights.bias is None else weights.bias.dtype)


BY_MLX = ExpertOps(
    fits=lambda weights, dtype: True,
    route_fits=lambda router, routing, dtype: True,
    route=route,
    glu=glu,
    down=down,
    combine=combine,
    route_many=route,
    many=many,
    compile=lambda function: function,
)
BY_KERNELS = ExpertOps(
    fits=expert_matmul.fits,
    route_fits=expert_routing.route_fits,
    route=expert_routing.route,
    glu=expert_matmul.expert_glu,
    down=expert_matmul.expert_down,
    combine=expert_routing.combine,
    route_many=expert_routing.route_many,
    many=many_by_kernels,
    compile=mx.compile,
)
