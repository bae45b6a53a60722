"""Mixtures of experts whose own modules compute by the kernels: all tokens of prefill passes.

A mixture whose routing is understood computes a pass in five launches. Of another one, its layer of experts alone uses
the kernels, in decode steps too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from millstream.backend.generation.layers.block_check import check_rows, random_rows
from millstream.backend.generation.layers.block_frame import Frame, NotUnderstood
from millstream.backend.generation.layers.expert_parts import ExpertParts, expert_layer, switch_parts
from millstream.backend.generation.layers.fused_experts import FEW_ROWS, MANY_ROWS, UNSURE, ops_for
from millstream.backend.generation.layers.fused_parts import Arrays
from millstream.backend.kernels.expert_matmul import Activation, ExpertWeights, Packing
from millstream.backend.kernels.expert_routing import Router, Routing
from millstream.backend.layers.expert_ops import ExpertOps
from millstream.backend.layers.fused_matmul import FusedMatmuls

SHAPES = 64
"""Numbers of tokens whose graph is kept: the first layer of a pass builds it, the others use it."""


@dataclass(frozen=True, slots=True)
class _Static:
    """All of a mixture but its arrays. Without `routing` it is a layer of experts."""

    ops: ExpertOps
    packings: tuple[Packing | None, Packing | None]
    """Of gates and what they open, and of the last projection."""
    activation: Activation
    routing: Routing | None = None
    routed_by: ExpertOps | None = None
    eps: float | None = None
    """Of the norm before it, if that is part of it; then the residual is too."""

    def chosen(self, x: mx.array, indices: mx.array, arrays: Arrays) -> mx.array:
        """What the experts of `indices`, (rows, slots), compute of x, (rows, size)."""
        gate, up, down = (
            ExpertWeights(arrays[name], self.packings[name == "down"], arrays.get(f"{name}_bias"))
            for name in ("gate", "up", "down")
        )
        return self.ops.many(x, indices.astype(mx.int32), gate, up, down, self.activation)

    def mixed(self, x: mx.array, shared: mx.array | None, live: mx.array | None, arrays: Arrays) -> mx.array:
        """The mixture's output for x, (rows, size). `shared`: what the shared expert computes. Rows where `live` is
        negative need no expert."""
        assert self.routing is not None and self.routed_by is not None
        router = Router(arrays["router"], arrays["count"], arrays.get("bias"), arrays.get("correction"))
        norm = None if self.eps is None else (arrays["norm"], self.eps)
        routed = self.routed_by.route_many(x, router, self.routing, norm, live)
        y = self.chosen(routed.x, routed.indices, arrays)
        return self.ops.combine(y, routed, shared, None if norm is None else x)


@functools.lru_cache(maxsize=SHAPES)
def _compiled(static: _Static, tokens: int) -> Callable[..., mx.array]:
    function = static.chosen if static.routing is None else static.mixed
    return static.ops.compile(function)  # type: ignore[no-any-return]


def _arrays(gate: ExpertWeights, up: ExpertWeights, down: ExpertWeights) -> Arrays:
    arrays: Arrays = {}
    for name, weights in (("gate", gate), ("up", up), ("down", down)):
        arrays[name] = weights.arrays
        arrays |= {} if weights.bias is None else {f"{name}_bias": weights.bias}
    return arrays


class FusedMixture:
    """A mixture of experts, without the norm before it and the residual."""

    def __init__(self, parts: ExpertParts, ops: ExpertOps, by_mlx: ExpertOps, dtype: mx.Dtype) -> None:
        """Raises `NotUnderstood` if the kernels do not take its experts. `by_mlx` routes if they do not take that."""
        if not all(ops.fits(weights, dtype) for weights in (parts.gate, parts.up, parts.down)):
            raise NotUnderstood("has experts that the kernels do not take")
        routed_by = ops if ops.route_fits(parts.router, parts.routing, dtype) else by_mlx
        packings = (parts.gate.packing, parts.down.packing)
        self._static = _Static(ops, packings, parts.activation, parts.routing, routed_by)
        self._arrays = _arrays(parts.gate, parts.up, parts.down)
        optional = {"bias": parts.router.bias, "correction": parts.router.correction}
        self._arrays |= {"router": parts.router.weight, "count": parts.router.count}
        self._arrays |= {name: array for name, array in optional.items() if array is not None}
        self._shared, self._dtype = parts.shared_module, dtype

    def takes(self, x: mx.array) -> bool:
        return x.dtype == self._dtype and x.size > 0

    def __call__(self, x: mx.array) -> mx.array:
        tokens = x.reshape(-1, x.shape[-1])
        shared = None if self._shared is None else self._shared(x).reshape(tokens.shape)
        return _compiled(self._static, tokens.shape[0])(tokens, shared, None, self._arrays).reshape(x.shape)

    def with_frame(self, frame: Frame) -> ChunkExperts | None:
        """The same with the norm before it and the residual; None if the block has more than that around it."""
        before = frame.before_mlp
        simple = frame.after_mlp is None and frame.factor == 1.0 and self._shared is None
        if before is None or before.weight is None or not simple:
            return None
        return ChunkExperts(dataclasses.replace(self._static, eps=before.eps), {**self._arrays, "norm": before.weight})


class ChunkExperts:
    """The second half of a block for the tokens of prompts: norm, mixture of experts, residual."""

    def __init__(self, static: _Static, arrays: Arrays) -> None:
        self._static, self._arrays = static, arrays

    def run(self, x: mx.array, live: mx.array | None = None) -> mx.array:
        """Rows where `live` is negative may get any numbers, and need no expert."""
        tokens = x.reshape(-1, x.shape[-1])
        return _compiled(self._static, tokens.shape[0])(tokens, None, live, self._arrays).reshape(x.shape)


def fuse_mixture(module: Any, parts: ExpertParts, ops: ExpertOps, by_mlx: ExpertOps, dtype: mx.Dtype) -> FusedMixture:
    """Have the module itself compute by the kernels. Raises `NotUnderstood` if that differs from what it computes."""
    fused = FusedMixture(parts, ops, by_mlx, dtype)
    for rows in (FEW_ROWS, MANY_ROWS):
        x = random_rows(parts.gate.inputs, dtype, rows)
        check_rows(lambda each: each + module(each), lambda each: each + fused(each), x, UNSURE)
    kind: Any = type(module)
    module._mixed = fused
    module.__class__ = _mixture_class(kind)
    return fused


def restore_mixtures(model: Any) -> None:
    """Have mixtures compute as mlx-lm wrote them."""
    for _, module in model.named_modules():
        if hasattr(module, "_mixed"):
            module.__class__ = type(module).__bases__[0]
            del module._mixed


def fuse_expert_layer(module: Any, matmuls: FusedMatmuls, dtype: mx.Dtype) -> bool:
    """Have only the layer of experts in a module compute by the kernels. Returns whether they take it."""
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
    indices = mx.random.randint(0, gate.experts, (MANY_ROWS, 1, 2), key=mx.random.key(13))
    try:
        for rows in (FEW_ROWS, MANY_ROWS):
            some = indices[:rows]
            check_rows(
                lambda each, some=some: kind.__call__(switch, each, some)[:, :, 0],  # type: ignore[misc]
                lambda each, some=some: fused(each, some)[:, :, 0],  # type: ignore[misc]
                random_rows(gate.inputs, dtype, rows),
                0.0,
            )
    except NotUnderstood:
        return False
    switch._fused = fused
    switch.__class__ = _layer_class(kind)
    return True


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
        self._static = _Static(ops, (gate.packing, down.packing), activation)
        self._dtype, self._arrays = dtype, _arrays(gate, up, down)

    def takes(self, x: mx.array) -> bool:
        return x.dtype == self._dtype and x.size > 0

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        tokens, slots = x.reshape(-1, x.shape[-1]), indices.reshape(-1, indices.shape[-1])
        out = _compiled(self._static, tokens.shape[0])(tokens, slots, self._arrays)
        return out.reshape(*indices.shape, -1)


@functools.cache
def _mixture_class(kind: Any) -> type:
    """A mixture of experts that computes by the kernels."""

    def call(self: Any, x: mx.array) -> mx.array:
        out: mx.array = self._mixed(x) if self._mixed.takes(x) else kind.__call__(self, x)
        return out

    return type(kind.__name__, (kind,), {"__call__": call})


@functools.cache
def _layer_class(kind: Any) -> type:
    """A layer of experts that computes by the kernels."""

    def call(self: Any, x: mx.array, indices: mx.array) -> mx.array:
        out: mx.array = self._fused(x, indices) if self._fused.takes(x) else kind.__call__(self, x, indices)
        return out

    return type(kind.__name__, (kind,), {"__call__": call})
