"""Mixtures of experts in a fused block: norm, router, experts, shared expert and residual in a few launches.

Where the routing of a module is not understood, its layer of experts alone uses the kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from millstream.backend.generation.layers.block_check import check_rows, random_rows
from millstream.backend.generation.layers.block_frame import Frame, NotUnderstood
from millstream.backend.generation.layers.expert_parts import ExpertParts, expert_layer, expert_parts, switch_parts
from millstream.backend.generation.layers.fused_parts import Arrays, prepared
from millstream.backend.kernels.expert_matmul import Activation, ExpertWeights, Packing
from millstream.backend.kernels.expert_routing import Router, Routing
from millstream.backend.kernels.small_matmul import WIDTHS
from millstream.backend.layers import expert_ops
from millstream.backend.layers.expert_ops import ExpertOps
from millstream.backend.layers.fused_matmul import BY_KERNELS, BY_MLX, Form, FusedMatmuls

MANY_ROWS, FEW_ROWS = 256, WIDTHS[1]
"""Rows by which ways to route are told apart: some differ in few of them. Rows by which the kernels are compared with
what was found: their logits differ in the last bit, and of many experts two are often as good. They are one launch, as
in a step: two launches of a layer may run at the same time, and they count in the same memory (see `Router.count`)."""
SURE, UNSURE = 0.25, 0.5
"""The share of rows that may choose otherwise, in these comparisons."""


@dataclass(frozen=True, slots=True)
class _Mixture:
    """What is static about a mixture: all but its arrays."""

    ops: ExpertOps
    matmuls: FusedMatmuls
    routing: Routing
    routed_by: ExpertOps
    packings: tuple[Packing | None, Packing | None]
    """Of gates and what they open, and of the last projection."""
    activation: Activation
    eps: float | None
    shared: tuple[Form, Form] | None
    adds: bool
    """True if the sum includes the residual."""

    def run(self, x: mx.array, live: mx.array | None, arrays: Arrays) -> mx.array:
        router = Router(arrays["router"], arrays["count"], arrays.get("bias"), arrays.get("correction"))
        norm = None if self.eps is None else (arrays["norm"], self.eps)
        routed = self.routed_by.route(x, router, self.routing, norm, live)
        gate, up, down = (
            ExpertWeights(arrays[name], self.packings[name == "down"], arrays.get(f"{name}_bias"))
            for name in ("gate", "up", "down")
        )
        y = self.ops.down(self.ops.glu(routed.x, routed.indices, gate, up, self.activation), routed.indices, down)
        shared = None
        if self.shared is not None:
            joined, out = (form.of(arrays[name]) for form, name in zip(self.shared, ("joined", "out"), strict=True))
            activation = self.activation.kind
            shared = self.matmuls.matmul(self.matmuls.glu(routed.x, joined, activation=activation), out)
        return self.ops.combine(y, routed, shared, x if self.adds else None)


@functools.cache
def _compiled(static: _Mixture) -> Callable[..., mx.array]:
    return static.ops.compile(static.run)  # type: ignore[no-any-return]


class FusedExperts:
    """The second half of a block: norm, mixture of experts, residual."""

    def __init__(self, parts: ExpertParts, frame: Frame, matmuls: FusedMatmuls, dtype: mx.Dtype) -> None:
        """Raises `NotUnderstood` if the kernels do not take its layers."""
        ops = ops_for(matmuls)
        if not all(ops.fits(weights, dtype) for weights in (parts.gate, parts.up, parts.down)):
            raise NotUnderstood("has experts that the kernels do not take")
        before, self._frame = frame.before_mlp, frame
        takes_norm = before is not None and before.weight is not None
        self._norm_first = None if takes_norm else before
        shared = None
        self._arrays: Arrays = {"router": parts.router.weight, "count": parts.router.count}
        if parts.shared is not None:
            joined, out = prepared(parts.shared.joined, matmuls), prepared(parts.shared.down, matmuls)
            if "bias" in parts.shared.joined or "bias" in parts.shared.down:
                raise NotUnderstood("has a shared expert with biases")
            shared = (joined.form, out.form)
            self._arrays |= {"joined": joined.arrays, "out": out.arrays}
        self._adds = frame.after_mlp is None and frame.factor == 1.0 and self._norm_first is None
        static = _Mixture(
            ops,
            matmuls,
            parts.routing,
            ops if ops.route_fits(parts.router, parts.routing, dtype) else expert_ops.BY_MLX,
            (parts.gate.packing, parts.down.packing),
            parts.activation,
            before.eps if before is not None and takes_norm else None,
            shared,
            self._adds,
        )
        optional = {
            "bias": parts.router.bias,
            "correction": parts.router.correction,
            "norm": before.weight if before is not None and takes_norm else None,
        }
        for name, weights in (("gate", parts.gate), ("up", parts.up), ("down", parts.down)):
            self._arrays[name] = weights.arrays
            optional[f"{name}_bias"] = weights.bias
        self._arrays |= {name: array for name, array in optional.items() if array is not None}
        self._run = _compiled(static)
        self.routing = parts.routing

    def run(self, x: mx.array, live: mx.array | None = None) -> mx.array:
        """Rows where `live` is negative may get any numbers, and need no expert."""
        out = self._run(x if self._norm_first is None else self._norm_first(x), live, self._arrays)
        return out if self._adds else self._frame.add(x, out, self._frame.after_mlp)


def ops_for(matmuls: FusedMatmuls) -> ExpertOps:
    return expert_ops.BY_KERNELS if matmuls is BY_KERNELS else expert_ops.BY_MLX


def fuse_experts(
    module: Any, frame: Frame, plain: Callable[[mx.array], mx.array], matmuls: FusedMatmuls, size: int, dtype: mx.Dtype
) -> FusedExperts:
    """The fused form of a mixture whose numbers agree with `plain`, the same half of the block by mlx-lm. Raises
    `NotUnderstood` if there is none."""
    trouble = None
    few, many = random_rows(size, dtype, FEW_ROWS), random_rows(size, dtype, MANY_ROWS)
    for parts in expert_parts(module, dtype):
        try:
            # MLX's operations tell first whether the routing is understood: nothing is compiled for that.
            check_rows(plain, FusedExperts(parts, frame, BY_MLX, dtype).run, many, SURE)
        except NotUnderstood as error:
            trouble = trouble or error
            continue
        fused = FusedExperts(parts, frame, matmuls, dtype)
        check_rows(plain, fused.run, few, UNSURE)
        return fused
    raise trouble or NotUnderstood("has a router that is not understood")


def fuse_expert_layer(module: Any, matmuls: FusedMatmuls, dtype: mx.Dtype) -> bool:
    """Have only the layer of experts in a module compute few rows by the kernels, and all tokens if it is packed.
    Returns whether they take it."""
    switch = expert_layer(module)
    if switch is None:
        return False
    ops = ops_for(matmuls)
    try:
        gate, up, down, activation = switch_parts(switch)
    except NotUnderstood:
        return False
    if not all(ops.fits(weights, dtype) for weights in (gate, up, down)):
        return False
    fused = _FusedLayer(ops, gate, up, down, activation, dtype)
    kind: Any = type(switch)
    x = random_rows(gate.inputs, dtype)
    indices = mx.random.randint(0, gate.experts, (*x.shape[:2], 2), key=mx.random.key(13))
    try:
        check_rows(
            lambda each: kind.__call__(switch, each, indices)[:, :, 0],
            lambda each: fused(each, indices)[:, :, 0],
            x,
            0.0,
        )
    except NotUnderstood:
        return False
    switch._fused = fused
    switch.__class__ = _layer_class(kind)
    return True


@dataclass(frozen=True, slots=True)
class _Layer:
    """What is static about a layer of experts."""

    ops: ExpertOps
    packings: tuple[Packing | None, Packing | None]
    activation: Activation

    def run(self, x: mx.array, indices: mx.array, arrays: Arrays) -> mx.array:
        gate, up, down = (
            ExpertWeights(arrays[name], self.packings[name == "down"], arrays.get(f"{name}_bias"))
            for name in ("gate", "up", "down")
        )
        indices = indices.astype(mx.int32)
        return self.ops.down(self.ops.glu(x, indices, gate, up, self.activation), indices, down)


@functools.cache
def _compiled_layer(static: _Layer) -> Callable[..., mx.array]:
    return static.ops.compile(static.run)  # type: ignore[no-any-return]


class _FusedLayer:
    def __init__(
        self,
        ops: ExpertOps,
        gate: ExpertWeights,
        up: ExpertWeights,
        down: ExpertWeights,
        activation: Activation,
        dtype: mx.Dtype,
    ) -> None:
        self._run = _compiled_layer(_Layer(ops, (gate.packing, down.packing), activation))
        self._max_rows, self._dtype, self._packed = ops.max_rows, dtype, gate.packing is not None
        self._arrays: Arrays = {}
        for name, weights in (("gate", gate), ("up", up), ("down", down)):
            self._arrays[name] = weights.arrays
            self._arrays |= {} if weights.bias is None else {f"{name}_bias": weights.bias}

    def takes(self, x: mx.array) -> bool:
        """True for the rows of a decode step, one token each. Also for chunks if the experts are packed: MLX's CUDA
        build would read an expert again for each of its tokens."""
        few = x.shape[0] <= self._max_rows and x.size == x.shape[0] * x.shape[-1]
        return x.dtype == self._dtype and (few or self._packed)

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        tokens, slots = x.reshape(-1, x.shape[-1]), indices.reshape(-1, indices.shape[-1])
        rows = [slice(first, first + self._max_rows) for first in range(0, tokens.shape[0], self._max_rows)]
        out = [self._run(tokens[each], slots[each], self._arrays) for each in rows]
        return (out[0] if len(out) == 1 else mx.concatenate(out)).reshape(*indices.shape, -1)


@functools.cache
def _layer_class(kind: Any) -> type:
    """A layer of experts that computes few rows by the kernels."""

    def call(self: Any, x: mx.array, indices: mx.array) -> mx.array:
        out: mx.array = self._fused(x, indices) if self._fused.takes(x) else kind.__call__(self, x, indices)
        return out

    return type(kind.__name__, (kind,), {"__call__": call})
