"""Mixtures of experts in a fused block: norm, router, experts, shared expert and residual in a few launches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from millstream.backend.generation.layers.block_check import check_matmuls, check_rows, random_rows
from millstream.backend.generation.layers.block_frame import Frame, NotUnderstood
from millstream.backend.generation.layers.expert_parts import ExpertParts, expert_parts
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
        return self.ops.combine(y, routed, self.shared_expert(routed.x, arrays), x if self.adds else None)

    def shared_expert(self, x: mx.array, arrays: Arrays) -> mx.array | None:
        """What it adds, if there is one."""
        if self.shared is None:
            return None
        joined, out = (form.of(arrays[name]) for form, name in zip(self.shared, ("joined", "out"), strict=True))
        return self.matmuls.matmul(self.matmuls.glu(x, joined, activation=self.activation.kind), out)


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
        self._static, self._run = static, _compiled(static)
        self.parts = parts

    def run(self, x: mx.array, live: mx.array | None = None) -> mx.array:
        """Rows where `live` is negative may get any numbers, and need no expert."""
        out = self._run(x if self._norm_first is None else self._norm_first(x), live, self._arrays)
        return out if self._adds else self._frame.add(x, out, self._frame.after_mlp)

    def run_matmuls(self, x: mx.array) -> None:
        """Make the calls of matmuls that rows `x` of a step make, uncompiled, and nothing else."""
        self._static.shared_expert(x, self._arrays)


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
        check_matmuls(matmuls, fused, size, dtype)
        check_rows(plain, fused.run, few, UNSURE)
        return fused
    raise trouble or NotUnderstood("has a router that is not understood")
