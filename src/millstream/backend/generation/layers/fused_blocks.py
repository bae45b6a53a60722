"""Transformer blocks whose decode step is a few launches: small-batch matmuls fused with what follows them.

`block_check` decides which blocks may be fused. Prefill chunks go through the same functions there, by matmuls of MLX.
In all models single linear layers use the kernels as well.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from millstream.backend.generation.caches.class_caches import SlabLayer
from millstream.backend.generation.caches.widths import CHUNK_LENGTHS
from millstream.backend.generation.layers.block_check import (
    ATTENTION,
    GATE,
    attention_shape,
    misfit,
    mlp_fits,
    numeric_misfit,
    rope_periods,
)
from millstream.backend.kernels.small_matmul import WIDTHS
from millstream.backend.layers.fused_matmul import (
    BY_KERNELS,
    BY_MLX_COMPILED,
    FusedMatmuls,
    join_heads,
    rope,
    split_heads,
)
from millstream.backend.layers.projections import joined_layer, joined_layers

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Fusion:
    """How many blocks and single linear layers of a model use fused matmuls."""

    blocks: int
    linears: int = 0
    refused: str | None = None
    """Why the first block that was left alone was."""

    def __bool__(self) -> bool:
        return self.blocks + self.linears > 0


def fuse_blocks(model: Any, matmuls: FusedMatmuls, attend: Callable[..., mx.array]) -> Fusion:
    """Have the model's blocks and linear layers compute few rows by `matmuls`. `attend` is the attention that the
    layers call. Weights must be evaluated."""
    fused, linears = 0, 0
    refused = None
    chunk_matmuls = BY_MLX_COMPILED if matmuls is BY_KERNELS else matmuls
    blocks = [(name, module) for name, module in model.named_modules() if "self_attn" in module and "mlp" in module]
    blocks.sort(key=lambda block: (len(block[0]), block[0]))
    for name, block in blocks:
        if (reason := _fuse(block, matmuls, chunk_matmuls, attend)) is None:
            fused += 1
        else:
            refused = refused or f"{name} {reason}"
    if refused is not None:
        log.info("Fused blocks are not used in %d of %d layers: %s", len(blocks) - fused, len(blocks), refused)
    if matmuls is BY_KERNELS:
        for layer in [module for _, module in model.named_modules()] + joined_layers(model):
            if type(layer) is nn.Linear and matmuls.fits(layer.weight):
                layer.__class__ = SmallMatmulLinear
                linears += 1
    return Fusion(fused, linears, refused)


def _fuse(
    block: Any, matmuls: FusedMatmuls, chunk_matmuls: FusedMatmuls, attend: Callable[..., mx.array]
) -> str | None:
    """Fuse one block, or say why not."""
    if (reason := misfit(block, matmuls)) is not None:
        return reason
    decode, chunk = (Halves(block, by, attend) for by in (matmuls, chunk_matmuls))
    if (reason := numeric_misfit(block, decode, chunk, kernels=matmuls is BY_KERNELS)) is not None:
        return reason
    kind: Any = type(block)
    block._decode_halves, block._chunk_halves = decode, chunk
    block.__class__ = _fused_class(kind)
    return None


def _is_decode(x: mx.array, weight: mx.array) -> bool:
    """True if the kernels can take x: one token per row, a width that they are compiled for, the weight's type."""
    return x.ndim == 3 and x.shape[1] == 1 and x.shape[0] in WIDTHS and x.dtype == weight.dtype


def _is_chunk(x: mx.array, weight: mx.array) -> bool:
    """True if x is a prefill chunk of one of the usual lengths: each is compiled once."""
    return x.shape[0] == 1 and x.shape[1] in CHUNK_LENGTHS and x.dtype == weight.dtype


_small_matmul = mx.compile(BY_KERNELS.matmul)


class SmallMatmulLinear(nn.Linear):  # type: ignore[misc]
    """A linear layer that computes few rows by our kernel."""

    def __call__(self, x: mx.array) -> mx.array:
        if not _is_decode(x, self.weight):
            out: mx.array = super().__call__(x)
            return out
        out = _small_matmul(x, self.weight)
        return out + self.bias if "bias" in self else out


class Halves:
    """What a block computes before and after attention, each as one compiled function. Weights are arguments, so that
    layers share the functions and none of them holds a model in memory."""

    def __init__(self, block: Any, matmuls: FusedMatmuls, attend: Callable[..., mx.array]) -> None:
        """`block` is one that `block_check.misfit` has nothing against."""
        attention, mlp = block.self_attn, block.mlp
        joined = joined_layer(attention, ATTENTION)
        shape = attention_shape(attention)
        periods = rope_periods(attention.rope, shape[2])
        assert periods is not None, "the rotary embedding was checked"
        mx.eval(periods)
        normed = "q_norm" in attention
        norm, second = block.input_layernorm, block.post_attention_layernorm
        head_eps = attention.q_norm.eps if normed else None
        self._attend = functools.partial(attend, scale=attention.scale)
        self._before = _before(matmuls, shape, norm.eps, "bias" in joined, head_eps)
        self._before_weights = [norm.weight, joined.weight, periods]
        self._before_weights += [joined.bias] if "bias" in joined else []
        self._before_weights += [attention.q_norm.weight, attention.k_norm.weight] if normed else []
        self.weight = attention.o_proj.weight
        self._after_weights = [self.weight]
        self.includes_mlp = mlp_fits(mlp, matmuls)
        """True if the second half ends with the MLP."""
        if self.includes_mlp:
            self._after_weights += [second.weight, joined_layer(mlp, GATE).weight, mlp.down_proj.weight]
        self._after = _after(matmuls, second.eps) if self.includes_mlp else _attended(matmuls)

    def run(self, x: mx.array, offset: mx.array, mask: Any, cache: Any) -> mx.array:
        """The output of the block, or of its attention and residual unless `includes_mlp`."""
        queries, keys, values = self._before(x, offset, *self._before_weights)
        keys, values = cache.update_and_fetch(keys, values)
        attended = self._attend(queries, keys, values, cache=cache, mask=mask)
        out: mx.array = self._after(x, attended, *self._after_weights)
        return out


@functools.cache
def _fused_class(kind: Any) -> type:
    """A subclass of `kind` that is fused for decode steps over slabs and for prefill chunks."""

    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if isinstance(cache, SlabLayer) and _is_decode(x, self._decode_halves.weight):
            halves, offset = self._decode_halves, cache.offset
        elif type(cache) is KVCache and _is_chunk(x, self._chunk_halves.weight):
            halves, offset = self._chunk_halves, mx.array([cache.offset], dtype=mx.int32)
        else:
            out: mx.array = kind.__call__(self, x, mask, cache)
            return out
        h: mx.array = halves.run(x, offset, mask, cache)
        return h if halves.includes_mlp else h + self.mlp(self.post_attention_layernorm(h))

    return type(kind.__name__, (kind,), {"__call__": call})


@functools.cache
def _before(
    matmuls: FusedMatmuls, shape: tuple[int, int, int], eps: float, biased: bool, head_eps: float | None
) -> Callable[..., Any]:
    """Norm, projections, RoPE; between the last two a bias or norms of single heads, if there are any."""

    def plain(x: mx.array, offset: mx.array, norm: mx.array, weight: mx.array, periods: mx.array) -> Any:
        return matmuls.qkv_rope(mx.fast.rms_norm(x, norm, eps), weight, offset, periods, *shape)

    def general(
        x: mx.array, offset: mx.array, norm: mx.array, weight: mx.array, periods: mx.array, *rest: mx.array
    ) -> Any:
        joined = matmuls.matmul(mx.fast.rms_norm(x, norm, eps), weight)
        queries, keys, values = split_heads(joined + rest[0] if biased else joined, *shape)
        if head_eps is not None:
            queries, keys = (
                mx.fast.rms_norm(each, scale, head_eps) for each, scale in zip((queries, keys), rest[-2:], strict=True)
            )
        return rope(queries, offset, periods), rope(keys, offset, periods), values

    return matmuls.compile(general if biased or head_eps is not None else plain)  # type: ignore[no-any-return]


@functools.cache
def _after(matmuls: FusedMatmuls, eps: float) -> Callable[..., mx.array]:
    def after(x: mx.array, attended: mx.array, out: mx.array, norm: mx.array, gate: mx.array, down: mx.array) -> Any:
        h = matmuls.matmul_add(join_heads(attended), out, x)
        return matmuls.matmul_add(matmuls.glu(mx.fast.rms_norm(h, norm, eps), gate), down, h)

    return matmuls.compile(after)  # type: ignore[no-any-return]


@functools.cache
def _attended(matmuls: FusedMatmuls) -> Callable[..., mx.array]:
    def after(x: mx.array, attended: mx.array, out: mx.array) -> mx.array:
        return matmuls.matmul_add(join_heads(attended), out, x)

    return matmuls.compile(after)  # type: ignore[no-any-return]
