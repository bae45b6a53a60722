"""Transformer blocks whose decode step is a few launches: matmuls of few rows with what follows them.

Taken over are blocks that are written exactly as mlx-lm writes Llama's (and as it writes Qwen3's attention): their code
is compared, instruction by instruction, so a model that does anything else is left alone. Chunks of prompts go through
the same functions there, with matmuls of MLX. In all models single linear layers use the kernels as well.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama, qwen3
from mlx_lm.models.activations import swiglu
from mlx_lm.models.cache import KVCache
from mlx_lm.models.rope_utils import Llama3RoPE

from millstream.backend.generation.caches.slots import SlotLayer
from millstream.backend.generation.caches.widths import CHUNK_LENGTHS
from millstream.backend.kernels.small_matmul import WIDTHS
from millstream.backend.layers import cpu_linear as cpu_layers
from millstream.backend.layers.fused_matmul import (
    BY_KERNELS,
    BY_MLX_COMPILED,
    FusedMatmuls,
    join_heads,
    rope,
    split_heads,
)
from millstream.backend.layers.projections import GROUPS, joined_layer, joined_layers

ATTENTION, GATE = GROUPS
SWIGLU = (swiglu, cpu_layers.swiglu)
DENSE = (nn.Linear, cpu_layers.MklLinear)


def fuse_blocks(model: Any, matmuls: FusedMatmuls, attend: Callable[..., mx.array]) -> int:
    """Have the model's blocks and linear layers compute few rows by `matmuls`; how many do so now. `attend` is the
    attention that the layers call."""
    taken = 0
    many = BY_MLX_COMPILED if matmuls is BY_KERNELS else matmuls
    for _, module in list(model.named_modules()):
        if (periods := _known(module, matmuls)) is not None:
            kind: Any = type(module)
            module._few, module._many = (Halves(module, by, attend, periods) for by in (matmuls, many))
            module.__class__ = _taken_over(kind)
            taken += 1
    if matmuls is BY_KERNELS:
        linears = [module for _, module in model.named_modules()] + joined_layers(model)
        for layer in linears:
            if type(layer) is nn.Linear and matmuls.fits(layer.weight):
                layer.__class__ = RowLinear
                taken += 1
    return taken


def _few(x: mx.array, weight: mx.array) -> bool:
    """Whether x is what the kernels are for: one token a row, a known width, the type of the weight."""
    return x.ndim == 3 and x.shape[1] == 1 and x.shape[0] in WIDTHS and x.dtype == weight.dtype


def _chunk(x: mx.array, weight: mx.array) -> bool:
    """Whether x is a piece of one prompt whose length comes again and again: each is compiled once."""
    return x.shape[0] == 1 and x.shape[1] in CHUNK_LENGTHS and x.dtype == weight.dtype


_row_product = mx.compile(BY_KERNELS.matmul)


class RowLinear(nn.Linear):  # type: ignore[misc]
    """A linear layer whose matmuls of few rows are ours."""

    def __call__(self, x: mx.array) -> mx.array:
        if not _few(x, self.weight):
            out: mx.array = super().__call__(x)
            return out
        out = _row_product(x, self.weight)
        return out + self.bias if "bias" in self else out


class Halves:
    """What a block computes before and after attention, each as one compiled function. Weights are arguments, so that
    layers share the functions and none of them keeps a model alive."""

    def __init__(self, block: Any, matmuls: FusedMatmuls, attend: Callable[..., mx.array], periods: mx.array) -> None:
        attention, mlp = block.self_attn, block.mlp
        joined = joined_layer(attention, ATTENTION)
        normed = "q_norm" in attention
        norm, second = block.input_layernorm, block.post_attention_layernorm
        shape = _shape(attention)
        inner = attention.q_norm.eps if normed else None
        self._attend = functools.partial(attend, scale=attention.scale)
        self._before = _before(matmuls, shape, norm.eps, "bias" in joined, inner)
        self._read = [norm.weight, joined.weight, periods]
        self._read += [joined.bias] if "bias" in joined else []
        self._read += [attention.q_norm.weight, attention.k_norm.weight] if normed else []
        self.weight = attention.o_proj.weight
        self._write = [self.weight]
        self.whole = _mlp_fits(mlp, matmuls)
        """Whether the second half has the MLP in it."""
        if self.whole:
            self._write += [second.weight, joined_layer(mlp, GATE).weight, mlp.down_proj.weight]
        self._after = _after(matmuls, second.eps) if self.whole else _attended(matmuls)

    def run(self, x: mx.array, offset: mx.array, mask: Any, cache: Any) -> mx.array:
        """What the block gives, but for the MLP where that is not `whole`."""
        queries, keys, values = self._before(x, offset, *self._read)
        keys, values = cache.update_and_fetch(keys, values)
        out: mx.array = self._after(x, self._attend(queries, keys, values, cache=cache, mask=mask), *self._write)
        return out


@functools.cache
def _taken_over(kind: Any) -> type:
    """`kind`, with other ways for few rows over slots and for chunks of a prompt."""

    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if isinstance(cache, SlotLayer) and _few(x, self._few.weight):
            halves, offset = self._few, cache.offset
        elif type(cache) is KVCache and _chunk(x, self._few.weight):
            halves, offset = self._many, mx.array([cache.offset], dtype=mx.int32)
        else:
            out: mx.array = kind.__call__(self, x, mask, cache)
            return out
        h: mx.array = halves.run(x, offset, mask, cache)
        return h if halves.whole else h + self.mlp(self.post_attention_layernorm(h))

    return type(kind.__name__, (kind,), {"__call__": call})


@functools.cache
def _before(
    matmuls: FusedMatmuls, shape: tuple[int, int, int], eps: float, biased: bool, inner: float | None
) -> Callable[..., Any]:
    """Norm, projections, rotary embedding; between the last two a bias or norms of single heads, if there are any."""

    def plain(x: mx.array, offset: mx.array, norm: mx.array, weight: mx.array, periods: mx.array) -> Any:
        return matmuls.qkv_rope(mx.fast.rms_norm(x, norm, eps), weight, offset, periods, *shape)

    def careful(
        x: mx.array, offset: mx.array, norm: mx.array, weight: mx.array, periods: mx.array, *rest: mx.array
    ) -> Any:
        joined = matmuls.matmul(mx.fast.rms_norm(x, norm, eps), weight)
        queries, keys, values = split_heads(joined + rest[0] if biased else joined, *shape)
        if inner is not None:
            queries, keys = (
                mx.fast.rms_norm(each, scale, inner) for each, scale in zip((queries, keys), rest[-2:], strict=True)
            )
        return rope(queries, offset, periods), rope(keys, offset, periods), values

    return matmuls.compile(careful if biased or inner is not None else plain)  # type: ignore[no-any-return]


@functools.cache
def _after(matmuls: FusedMatmuls, eps: float) -> Callable[..., mx.array]:
    def after(x: mx.array, attended: mx.array, out: mx.array, norm: mx.array, gate: mx.array, down: mx.array) -> Any:
        h = matmuls.matmul_add(join_heads(attended), out, x)
        return matmuls.matmul_add(matmuls.swiglu(mx.fast.rms_norm(h, norm, eps), gate), down, h)

    return matmuls.compile(after)  # type: ignore[no-any-return]


@functools.cache
def _attended(matmuls: FusedMatmuls) -> Callable[..., mx.array]:
    def after(x: mx.array, attended: mx.array, out: mx.array) -> mx.array:
        return matmuls.matmul_add(join_heads(attended), out, x)

    return matmuls.compile(after)  # type: ignore[no-any-return]


def _known(block: Any, matmuls: FusedMatmuls) -> mx.array | None:
    """For a block that is known in every part, the periods of its rotary embedding; None for all else."""
    if not _written_as(block, llama.TransformerBlock):
        return None
    attention = block.self_attn
    written = _written_as(attention, llama.Attention) or _written_as(attention, qwen3.Attention)
    norms = (block.input_layernorm, block.post_attention_layernorm, *_inner_norms(attention))
    if not written or any(type(norm) is not nn.RMSNorm for norm in norms):
        return None
    joined, out = joined_layer(attention, ATTENTION), attention.o_proj
    if not all(type(layer) in DENSE and matmuls.fits(layer.weight) for layer in (joined, out)) or "bias" in out:
        return None
    size = _shape(attention)[2]
    periods = _periods(attention.rope, size) if matmuls.fits_heads(size) else None
    if periods is not None:
        mx.eval(periods)
    return periods


def _inner_norms(attention: Any) -> list[Any]:
    return [attention[name] for name in ("q_norm", "k_norm") if name in attention]


def _mlp_fits(mlp: Any, matmuls: FusedMatmuls) -> bool:
    if not _written_as(mlp, llama.MLP) or _called(mlp).__globals__["swiglu"] not in SWIGLU:
        return False
    layers = (joined_layer(mlp, GATE), mlp.down_proj)
    return all(type(layer) in DENSE and "bias" not in layer and matmuls.fits(layer.weight) for layer in layers)


def _shape(attention: Any) -> tuple[int, int, int]:
    """Heads of queries, heads of keys and values, and their size."""
    return attention.n_heads, attention.n_kv_heads, attention.o_proj.weight.shape[1] // attention.n_heads


def _periods(rope: Any, size: int) -> mx.array | None:
    """How many positions each pair of a head takes for a turn of one radian."""
    if type(rope) not in (nn.RoPE, Llama3RoPE) or rope.dims != size or rope.traditional:
        return None
    if type(rope) is Llama3RoPE:
        return rope._freqs.astype(mx.float32)  # type: ignore[no-any-return]
    return rope.base ** (mx.arange(0, size, 2, dtype=mx.float32) / size) / rope.scale  # type: ignore[no-any-return]


def _called(module: Any) -> Any:
    return vars(type(module)).get("__call__")


def _written_as(module: Any, kind: Any) -> bool:
    """Whether calling `module` runs the very instructions of `kind`."""
    call = _called(module)
    if not isinstance(call, types.FunctionType):
        return False
    ours, theirs = call.__code__, kind.__call__.__code__
    return (ours.co_code, ours.co_names, ours.co_consts) == (theirs.co_code, theirs.co_names, theirs.co_consts)
