"""Modules of any kind (convolutions, recurrent layers, latent attention, MLPs without a gate) in a fused block: their
first layers take the norm with them, and their last one the residual.

Which layers these are is seen by watching one call: arrays keep their identity from one layer to the next.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from millstream.backend.generation.layers.block_frame import Frame, Norm, NotUnderstood, watched_calls
from millstream.backend.generation.layers.block_parts import weight_of
from millstream.backend.generation.layers.fused_parts import prepared
from millstream.backend.layers.fused_matmul import Form, FusedMatmuls, Weight
from millstream.backend.layers.fused_matmul import Norm as MatmulNorm
from millstream.backend.layers.projections import part_of

Call = Callable[[mx.array], mx.array]


class Role:
    """What a linear layer computes besides its matmul, for as long as one call of its module takes."""

    __slots__ = ("matmuls", "norm", "residual", "weight")

    def __init__(self, matmuls: FusedMatmuls, weight: Weight) -> None:
        self.matmuls, self.weight = matmuls, weight
        self.norm: Norm | None = None
        self.residual: mx.array | None = None


@functools.cache
def _layer_class(kind: Any) -> type:
    """A linear layer that has a role while its block decodes."""

    def call(self: Any, x: mx.array) -> mx.array:
        role: Role = self.role
        if role.norm is None and role.residual is None:
            out: mx.array = kind.__call__(self, x)
            return out
        eps = None if role.norm is None else role.norm.eps
        return _compiled(role.matmuls, role.weight.form, eps)(x, _arrays(self, role.norm, role.residual))

    return type(kind.__name__, (kind,), {"__call__": call})


def _arrays(layer: Any, norm: Norm | None, residual: mx.array | None) -> dict[str, Any]:
    """The weights that a layer computes with, and what else it reads."""
    optional = {"bias": layer.get("bias"), "norm": None if norm is None else norm.weight, "residual": residual}
    return {"weight": layer.role.weight.arrays, **{name: each for name, each in optional.items() if each is not None}}


def _matmul(matmuls: FusedMatmuls, form: Form, eps: float | None, x: mx.array, arrays: dict[str, Any]) -> mx.array:
    weight, norm = form.of(arrays["weight"]), None if eps is None else MatmulNorm(arrays["norm"], eps)
    if "residual" in arrays:
        return matmuls.matmul_add(x, weight, arrays["residual"], norm=norm, bias=arrays.get("bias"))
    return matmuls.matmul(x, weight, norm=norm, bias=arrays.get("bias"))


@functools.cache
def _compiled(matmuls: FusedMatmuls, form: Form, eps: float | None) -> Callable[..., mx.array]:
    return matmuls.compile(functools.partial(_matmul, matmuls, form, eps))  # type: ignore[no-any-return]


class FusedModule:
    """One half of a block: norm, a module, residual."""

    def __init__(
        self,
        module: Any,
        frame: Frame,
        norms: tuple[Norm | None, Norm | None],
        matmuls: FusedMatmuls,
        watch: Callable[[Any, mx.array], Any],
        x: mx.array,
    ) -> None:
        """`watch` calls the module with an input, here `x`. Raises `NotUnderstood` if there is nothing to fuse."""
        self._module, self._frame = module, frame
        self._before, self._after = norms
        firsts, last = outer_layers(module, watch, x)
        takes_norm = self._before is not None and self._before.weight is not None and bool(firsts)
        takes_residual = last is not None and self._after is None and frame.factor == 1.0
        self._firsts = _take(firsts, matmuls) if takes_norm else []
        self._last = _take([last], matmuls)[0] if takes_residual else None
        self._layers = (firsts if takes_norm else [], last if takes_residual else None)
        if not self._firsts and self._last is None:
            raise NotUnderstood("has no layers that take a norm or a residual")

    def run(self, x: mx.array, *arguments: Any) -> mx.array:
        normed = x if self._firsts or self._before is None else self._before(x)
        try:
            for role in self._firsts:
                role.norm = self._before
            if self._last is not None:
                self._last.residual = x
            out = self._call(normed, *arguments)
        finally:
            for role in self._firsts:
                role.norm = None
            if self._last is not None:
                self._last.residual = None
        return out if self._last is not None else self._frame.add(x, out, self._after)

    def run_matmuls(self, x: mx.array) -> None:
        """Make the calls of matmuls that rows `x` of a step make of these layers, uncompiled, and nothing else."""
        firsts, last = self._layers
        uses: list[tuple[Any, Norm | None, mx.array | None]]
        uses = [(layer, self._before, None) for layer in firsts if layer is not last]
        if last is not None:
            uses.append((last, self._before if any(layer is last for layer in firsts) else None, x))
        for layer, norm, residual in uses:
            role, eps = layer.role, None if norm is None else norm.eps
            rows = mx.zeros((*x.shape[:-1], role.weight.inputs), dtype=x.dtype)
            _matmul(role.matmuls, role.weight.form, eps, rows, _arrays(layer, norm, residual))

    def _call(self, x: mx.array, *arguments: Any) -> mx.array:
        if arguments:
            return self._frame.call_mixer(self._module, x, *arguments)
        out: mx.array = self._module(x)
        return out


def outer_layers(module: Any, watch: Callable[[Any, mx.array], Any], x: mx.array) -> tuple[list[Any], Any]:
    """The linear layers that read the input of a module as it is, and the one whose output is the module's."""
    linears = {name: layer for name, layer in module.items() if isinstance(layer, nn.Module) and _linear(layer)}
    calls, out = watched_calls(module, linears, lambda: watch(module, x))
    firsts = {id(layer): layer for call in calls if call.x is x for layer in [_linear(linears[call.name])]}
    last = next((_linear(linears[call.name]) for call in calls if call.out is out), None)
    return list(firsts.values()), last


def _linear(layer: Any) -> Any:
    """A linear layer, or the one that it was joined into; None for other modules."""
    layer = part_of(layer) or layer
    return layer if weight_of(layer) is not None else None


def _take(layers: list[Any], matmuls: FusedMatmuls) -> list[Role]:
    weights = [prepared(layer, matmuls) for layer in layers]
    for layer, weight in zip(layers, weights, strict=True):
        if not hasattr(layer, "role"):
            kind: Any = type(layer)
            layer.role = Role(matmuls, weight)
            layer.__class__ = _layer_class(kind)
    return [layer.role for layer in layers]
