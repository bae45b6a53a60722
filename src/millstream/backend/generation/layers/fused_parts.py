"""The parts of a fused block as they run: attention, a gated MLP, or a module whose outer layers take a norm and a
residual with them. Each is a few launches.

What is computed between two calls of attention is compiled. Weights are arguments of the compiled functions, so that
layers share them and none of them holds a model in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from millstream.backend.generation.caches.flat_caches import FlatStates
from millstream.backend.generation.caches.state_caches import StateLayer
from millstream.backend.generation.layers.block_frame import Frame, Norm, NotUnderstood
from millstream.backend.generation.layers.block_parts import AttentionParts, ConvParts, GluParts, Rope, weight_of
from millstream.backend.generation.layers.state_layers import short_conv_pass, short_conv_prompts
from millstream.backend.layers import state_ops
from millstream.backend.layers.fused_matmul import BY_KERNELS, Form, FusedMatmuls, Weight, join_heads, split_heads
from millstream.backend.layers.fused_matmul import Norm as MatmulNorm
from millstream.backend.layers.fused_matmul import Role as MatmulRole
from millstream.backend.layers.state_ops import StateOps

Arrays = dict[str, Any]
"""Weights by role: arrays, or tuples of arrays."""


@dataclass(frozen=True, slots=True)
class _Finish:
    """What is static about the end of a part: its last matmul, a norm of the result, the residual."""

    matmuls: FusedMatmuls
    form: Form
    eps: float | None
    factor: float

    def run(self, x: mx.array, residual: mx.array, arrays: Arrays) -> mx.array:
        weight, bias = self.form.of(arrays["out"]), arrays.get("out_bias")
        if self.eps is None:
            return self.matmuls.matmul_add(x, weight, residual, bias=bias, factor=self.factor)
        new, norm = self.matmuls.matmul(x, weight, bias=bias), MatmulNorm(arrays["after"], self.eps)
        if self.factor != 1.0:
            return residual + self.factor * mx.fast.rms_norm(new, norm.weight, norm.eps)
        out: mx.array = self.matmuls.norm_add(new, norm, residual)
        return out


@dataclass(frozen=True, slots=True)
class _Projection:
    """What is static about the projections of attention."""

    matmuls: FusedMatmuls
    form: Form
    shape: tuple[int, int, int]
    eps: float | None
    head_eps: float | None
    rope: tuple[int, bool, float] | None
    """Rotated numbers of a head, whether pairs stand side by side, and the factor."""
    gated: bool

    def run(self, x: mx.array, offset: mx.array, arrays: Arrays) -> Any:
        norm, q_norm, k_norm = (
            None if eps is None else MatmulNorm(arrays[name], eps)
            for name, eps in (("before", self.eps), ("q_norm", self.head_eps), ("k_norm", self.head_eps))
        )
        weight, bias = self.form.of(arrays["joined"]), arrays.get("bias")
        side_by_side = self.rope is not None and self.rope[1]
        if not self.gated and not side_by_side and self.matmuls.fits_heads(self.shape[2]):
            return self.matmuls.qkv_rope(
                *(x, weight, offset, arrays.get("periods"), *self.shape),
                bias=bias,
                norm=norm,
                q_norm=q_norm,
                k_norm=k_norm,
                factor=1.0 if self.rope is None else self.rope[2],
            )
        return self._by_steps(self.matmuls.matmul(x, weight, norm=norm, bias=bias), offset, arrays)

    def _by_steps(self, joined: mx.array, offset: mx.array, arrays: Arrays) -> Any:
        heads, groups, size = self.shape
        gate = []
        if self.gated:
            wide, rest = mx.split(joined, [2 * heads * size], axis=-1)
            queries, values = mx.split(wide.reshape(*wide.shape[:2], heads, 2 * size), 2, axis=-1)
            gate = [values.reshape(*wide.shape[:2], -1)]
            joined = mx.concatenate([queries.reshape(*wide.shape[:2], -1), rest], axis=-1)
        queries, keys, values = split_heads(joined, heads, groups, size)
        if self.head_eps is not None:
            queries = mx.fast.rms_norm(queries, arrays["q_norm"], self.head_eps)
            keys = mx.fast.rms_norm(keys, arrays["k_norm"], self.head_eps)
        if self.rope is not None:
            rope = Rope(arrays["periods"], *self.rope)
            queries, keys = rope(queries, offset), rope(keys, offset)
        return (queries, keys, values, *gate)


@dataclass(frozen=True, slots=True)
class _Attended:
    """What is static about what comes after attention."""

    finish: _Finish

    def run(self, x: mx.array, attended: mx.array, arrays: Arrays, *gate: mx.array) -> mx.array:
        joined = join_heads(attended)
        return self.finish.run(joined * mx.sigmoid(gate[0]) if gate else joined, x, arrays)


@dataclass(frozen=True, slots=True)
class _Glu:
    """What is static about a gated MLP."""

    matmuls: FusedMatmuls
    form: Form
    eps: float | None
    activation: str
    finish: _Finish

    def run(self, x: mx.array, residual: mx.array, arrays: Arrays) -> mx.array:
        norm = None if self.eps is None else MatmulNorm(arrays["before"], self.eps)
        weight = self.form.of(arrays["joined"])
        hidden = self.matmuls.glu(x, weight, norm=norm, bias=arrays.get("bias"), activation=self.activation)
        return self.finish.run(hidden, residual, arrays)


@dataclass(frozen=True, slots=True)
class _Conv:
    """What is static about a short convolution."""

    matmuls: FusedMatmuls
    form: Form
    eps: float | None
    ops: StateOps
    finish: _Finish

    def project(self, x: mx.array, arrays: Arrays) -> mx.array:
        norm = None if self.eps is None else MatmulNorm(arrays["before"], self.eps)
        return self.matmuls.matmul(x, self.form.of(arrays["joined"]), norm=norm, bias=arrays.get("bias"))

    def run(self, x: mx.array, residual: mx.array, state: mx.array, arrays: Arrays) -> tuple[mx.array, mx.array]:
        out, state = self.ops.short_conv(self.project(x, arrays), state, arrays["conv"])
        return self.finish.run(out, residual, arrays), state


@functools.cache
def _compiled(static: Any, matmuls: FusedMatmuls) -> Callable[..., Any]:
    return matmuls.compile(static.run)  # type: ignore[no-any-return]


@functools.cache
def _compiled_projection(static: _Conv, matmuls: FusedMatmuls) -> Callable[..., mx.array]:
    return matmuls.compile(static.project)  # type: ignore[no-any-return]


class FusedAttention:
    """The first half of a block: norm, attention, residual."""

    def __init__(
        self, parts: AttentionParts, frame: Frame, matmuls: FusedMatmuls, attend: Callable[..., mx.array]
    ) -> None:
        """Raises `NotUnderstood` if the matmuls do not take its layers."""
        norm, self._norm_first = _prologue(frame.before_mixer)
        joined, out = prepared(parts.joined, matmuls, "qkv_rope"), prepared(parts.out, matmuls, _end(frame.after_mixer))
        finish = _finish(out, frame.after_mixer, frame.factor, matmuls)
        rope, head_norm = parts.rope, parts.q_norm
        before = _Projection(
            *(matmuls, joined.form, (parts.heads, parts.groups, parts.size)),
            *(None if norm is None else norm.eps, None if head_norm is None else head_norm.eps),
            None if rope is None else (rope.size, rope.traditional, rope.factor),
            parts.gated,
        )
        self._static = before, _Attended(finish)
        self._before, self._after = (_compiled(each, matmuls) for each in self._static)
        self._before_arrays: Arrays = {"joined": joined.arrays, **_bias("bias", parts.joined), **_scale("before", norm)}
        if head_norm is not None:
            assert parts.k_norm is not None, "norms of queries and keys come together"
            self._before_arrays |= {**_scale("q_norm", head_norm), **_scale("k_norm", parts.k_norm)}
        if rope is not None:
            self._before_arrays["periods"] = rope.periods
        self._after_arrays = _finish_arrays(out, parts.out, frame.after_mixer)
        self._attend = functools.partial(attend, **parts.options)

    def run(self, x: mx.array, mask: Any, cache: Any, offset: mx.array | None = None) -> mx.array:
        normed = x if self._norm_first is None else self._norm_first(x)
        offset = cache.offset if offset is None else offset
        queries, keys, values, *gate = self._before(normed, offset, self._before_arrays)
        keys, values = cache.update_and_fetch(keys, values)
        attended = self._attend(queries, keys, values, cache=cache, mask=mask)
        out: mx.array = self._after(x, attended, self._after_arrays, *gate)
        return out

    def run_matmuls(self, x: mx.array) -> None:
        """Make the calls of matmuls that rows `x` of a step make, uncompiled, and nothing else."""
        before, after = self._static
        offset = mx.zeros((x.shape[0],), dtype=mx.int32)
        queries, _, _, *gate = before.run(x, offset, self._before_arrays)
        after.run(x, queries, self._after_arrays, *gate)


class FusedConv:
    """The first half of a block: norm, short convolution, residual."""

    def __init__(self, parts: ConvParts, frame: Frame, matmuls: FusedMatmuls, plain: PlainPart) -> None:
        """`plain` computes what this cannot."""
        norm, self._norm_first = _prologue(frame.before_mixer)
        joined, out = prepared(parts.joined, matmuls, "matmul"), prepared(parts.out, matmuls, _end(frame.after_mixer))
        finish = _finish(out, frame.after_mixer, frame.factor, matmuls)
        ops = state_ops.BY_KERNELS if matmuls is BY_KERNELS else state_ops.BY_MLX
        static = _Conv(matmuls, joined.form, None if norm is None else norm.eps, ops, finish)
        self._static, self._out_inputs = static, out.inputs
        self._run, self._plain, self._conv = _compiled(static, matmuls), plain, (parts.weight, ops)
        self._project, self._finish = _compiled_projection(static, matmuls), _compiled(finish, matmuls)
        self._arrays = {"joined": joined.arrays, **_bias("bias", parts.joined), **_scale("before", norm)}
        self._arrays |= {"conv": parts.weight, **_finish_arrays(out, parts.out, frame.after_mixer)}

    def run(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        if isinstance(cache, FlatStates):
            return self._over_all(x, lambda projected: short_conv_prompts(projected, cache, *self._conv))
        state = cache[0]
        if mask is not None or state is None or state.dtype != x.dtype or cache.lengths is not None:
            return self._plain.run(x, mask, cache)
        if isinstance(cache, StateLayer) and cache.shape.length > 1:
            return self._over_all(x, lambda projected: short_conv_pass(projected, cache, *self._conv))
        out: mx.array
        out, cache[0] = self._run(self._normed(x), x, state, self._arrays)
        cache.advance(1)
        return out

    def _over_all(self, x: mx.array, convolve: Callable[[mx.array], mx.array]) -> mx.array:
        """Over all tokens of a flat pass at once."""
        out: mx.array = self._finish(convolve(self._project(self._normed(x), self._arrays)), x, self._arrays)
        return out

    def _normed(self, x: mx.array) -> mx.array:
        return x if self._norm_first is None else self._norm_first(x)

    def run_matmuls(self, x: mx.array) -> None:
        """As those of `FusedAttention`."""
        projected = self._static.project(x, self._arrays)
        self._static.finish.run(projected[..., : self._out_inputs], x, self._arrays)


class FusedGlu:
    """The second half of a block: norm, gated MLP, residual."""

    def __init__(self, parts: GluParts, frame: Frame, matmuls: FusedMatmuls) -> None:
        norm, self._norm_first = _prologue(frame.before_mlp)
        joined, down = prepared(parts.joined, matmuls, "glu"), prepared(parts.down, matmuls, _end(frame.after_mlp))
        finish = _finish(down, frame.after_mlp, frame.factor, matmuls)
        static = _Glu(matmuls, joined.form, None if norm is None else norm.eps, parts.activation, finish)
        self._static, self._run = static, _compiled(static, matmuls)
        self._arrays = {"joined": joined.arrays, **_bias("bias", parts.joined), **_scale("before", norm)}
        self._arrays |= _finish_arrays(down, parts.down, frame.after_mlp)

    def run(self, x: mx.array) -> mx.array:
        out: mx.array = self._run(x if self._norm_first is None else self._norm_first(x), x, self._arrays)
        return out

    def run_matmuls(self, x: mx.array) -> None:
        """As those of `FusedAttention`."""
        self._static.run(x, x, self._arrays)


class PlainPart:
    """A part as mlx-lm computes it."""

    def __init__(self, frame: Frame, before: Norm | None, after: Norm | None, call: Callable[..., mx.array]) -> None:
        self._frame, self._norms, self._call = frame, (before, after), call

    def run(self, x: mx.array, *arguments: Any) -> mx.array:
        before, after = self._norms
        return self._frame.add(x, self._call(x if before is None else before(x), *arguments), after)


def _prologue(norm: Norm | None) -> tuple[Norm | None, Norm | None]:
    """A norm that a matmul can take, or one that must be called first."""
    return (norm, None) if norm is None or norm.weight is not None else (None, norm)


def prepared(layer: Any, matmuls: FusedMatmuls, role: MatmulRole | None = None) -> Weight:
    """The weight of a layer, for a function of the matmuls. Raises `NotUnderstood` if the matmuls do not take it."""
    weight = weight_of(layer)
    if weight is None or not matmuls.fits(weight):
        raise NotUnderstood("has projections that the matmuls do not take")
    weight = matmuls.prepare(weight, role)
    mx.eval(weight.arrays)
    return weight


def _end(norm: Norm | None) -> MatmulRole:
    """What a block ends with: a norm stands between the projection and the residual, or nothing does."""
    return "matmul_add" if norm is None else "matmul"


def _finish(weight: Weight, norm: Norm | None, factor: float, matmuls: FusedMatmuls) -> _Finish:
    if norm is not None and norm.weight is None:
        raise NotUnderstood(f"has norms of its own ({type(norm.module).__name__})")
    return _Finish(matmuls, weight.form, None if norm is None else norm.eps, factor)


def _finish_arrays(weight: Weight, layer: Any, norm: Norm | None) -> Arrays:
    return {"out": weight.arrays, **_bias("out_bias", layer), **_scale("after", norm)}


def _bias(name: str, layer: Any) -> Arrays:
    return {name: layer["bias"]} if "bias" in layer else {}


def _scale(name: str, norm: Norm | None) -> Arrays:
    return {} if norm is None else {name: norm.weight}
