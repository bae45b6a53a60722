"""Decides which transformer blocks may be fused: by their structure first, then by comparing numbers.

A fused block computes norm, attention, residual, norm, MLP, residual, as mlx-lm's Llama and Qwen3 do. Other families
add steps (Gemma's norms, Granite's residual multiplier) or write the same steps in another order. So a block must name
nothing that the fused one does not have, and must then give the same numbers for the same input, on this device.
"""

from __future__ import annotations

import types
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama, qwen3
from mlx_lm.models.activations import swiglu
from mlx_lm.models.cache import KVCache
from mlx_lm.models.rope_utils import Llama3RoPE

from millstream.backend.generation.caches.class_caches import ClassCaches
from millstream.backend.generation.caches.joining import JoiningRows
from millstream.backend.generation.caches.slots import SlotCaches
from millstream.backend.generation.caches.widths import CHUNK_LENGTHS, exact, kernel_width
from millstream.backend.kernels.small_matmul import WIDTHS
from millstream.backend.layers import cpu_linear
from millstream.backend.layers.fused_matmul import FusedMatmuls
from millstream.backend.layers.projections import GROUPS, joined_layer

ATTENTION, GATE = GROUPS
SWIGLU = (swiglu, cpu_linear.swiglu)
DENSE = (nn.Linear, cpu_linear.MklLinear)
ARGUMENTS = ("self", "x", "mask", "cache")
BLOCK_NAMES = frozenset(llama.TransformerBlock.__call__.__code__.co_names)
ATTENTION_NAMES = frozenset(llama.Attention.__call__.__code__.co_names)
HEAD_NORM_NAMES = frozenset(qwen3.Attention.__call__.__code__.co_names) - ATTENTION_NAMES
MLP_NAMES = frozenset(llama.MLP.__call__.__code__.co_names)

TOLERANCE = {mx.float32: 1e-3, mx.float16: 0.05, mx.bfloat16: 0.05}
"""How far a fused block may be from the original, relative to what the block adds to its input."""
COLUMNS = 8
"""Tokens that the rows of the comparison have in their caches, at most."""


class Halves(Protocol):
    """The fused form of a block: see `fused_blocks.Halves`."""

    includes_mlp: bool

    def run(self, x: mx.array, offset: mx.array, mask: Any, cache: Any) -> mx.array: ...


def misfit(block: Any, matmuls: FusedMatmuls) -> str | None:
    """Why the structure of a block forbids to fuse it; None if it does not."""
    attention = block.self_attn
    if other := _other_names(block, BLOCK_NAMES) or _other_names(attention, ATTENTION_NAMES, HEAD_NORM_NAMES):
        return f"has other steps than a fused block ({other})"
    norms = (block.input_layernorm, block.post_attention_layernorm, *_head_norms(attention))
    if odd := next((norm for norm in norms if type(norm) is not nn.RMSNorm), None):
        return f"has norms of its own ({type(odd).__name__})"
    joined, out = joined_layer(attention, ATTENTION), attention.o_proj
    if joined is None:
        return "has projections that were not joined"
    if not all(type(layer) in DENSE and matmuls.fits(layer.weight) for layer in (joined, out)):
        return "has projections that the matmuls do not take"
    if "bias" in out:
        return "has a bias after attention"
    size = attention_shape(attention)[2]
    if not matmuls.fits_heads(size) or rope_periods(attention.rope, size) is None:
        return f"has another rotary embedding ({type(attention.rope).__name__})"
    return None


def mlp_fits(mlp: Any, matmuls: FusedMatmuls) -> bool:
    """True if the MLP is SwiGLU by plain layers without a bias. Else only the attention of its block is fused."""
    call = _called(mlp)
    if call is None or set(call.__code__.co_names) != MLP_NAMES or call.__globals__["swiglu"] not in SWIGLU:
        return False
    layers = (joined_layer(mlp, GATE), mlp.down_proj)
    return all(type(layer) in DENSE and "bias" not in layer and matmuls.fits(layer.weight) for layer in layers)


def attention_shape(attention: Any) -> tuple[int, int, int]:
    """Heads of queries, heads of keys and values, and their size."""
    return attention.n_heads, attention.n_kv_heads, attention.o_proj.weight.shape[1] // attention.n_heads


def rope_periods(rope: Any, size: int) -> mx.array | None:
    """Positions per radian for each pair of a head, which is what MLX calls `freqs`. None for other kinds of RoPE."""
    if type(rope) not in (nn.RoPE, Llama3RoPE) or rope.dims != size or rope.traditional:
        return None
    if type(rope) is Llama3RoPE:
        return rope._freqs.astype(mx.float32)  # type: ignore[no-any-return]
    return rope.base ** (mx.arange(0, size, 2, dtype=mx.float32) / size) / rope.scale  # type: ignore[no-any-return]


def numeric_misfit(block: Any, decode: Halves, chunk: Halves, *, kernels: bool) -> str | None:
    """Why the numbers forbid to fuse a block: how far the fused ones are from mlx-lm's. None if they agree."""
    tolerance = TOLERANCE.get(block.self_attn.o_proj.weight.dtype, 0.0)
    try:
        apart = max(_decode_difference(block, decode, kernels), _chunk_difference(block, chunk))
    except (ValueError, TypeError, RuntimeError, AttributeError, IndexError) as error:
        return f"cannot run fused ({str(error) or type(error).__name__})"
    # Not a number is no agreement either.
    return None if apart <= tolerance else f"differs by {apart:.2g} from mlx-lm's"


def _decode_difference(block: Any, halves: Halves, kernels: bool) -> float:
    """Over slabs, with rows of unequal length. The original gets a rectangle and a mask, as it would from MLX."""
    rows = WIDTHS[0]
    _, groups, size = attention_shape(block.self_attn)
    x = _random(block, 1, rows, 1)
    keys, values = (_random(block, seed, rows, groups, COLUMNS, last=size) for seed in (2, 3))
    joining = JoiningRows([(keys, values)], tuple(row % COLUMNS for row in range(rows)))
    plain, ours = SlotCaches(1, exact), ClassCaches(joining.layers, exact, width=kernel_width, kernels=kernels)
    for caches in (plain, ours):
        caches.join([joining])
        caches.begin_step()
    mx.eval(plain.layers[0].parts)
    expected = _original(block, halves, x, plain.mask, plain.layers[0])
    return _difference(x, expected, halves.run(x, ours.step.offset, None, ours.layers[0]))


def _chunk_difference(block: Any, halves: Halves) -> float:
    """Over the first chunk of a prompt."""
    x = _random(block, 4, 1, CHUNK_LENGTHS[0])
    expected = _original(block, halves, x, "causal", KVCache())
    return _difference(x, expected, halves.run(x, mx.array([0], dtype=mx.int32), "causal", KVCache()))


def _original(block: Any, halves: Halves, x: mx.array, mask: Any, cache: Any) -> mx.array:
    """What mlx-lm computes. Without the MLP where that is not fused: a router of experts may decide differently if its
    input differs in the last bit."""
    if halves.includes_mlp:
        out: mx.array = block(x, mask, cache)
        return out
    attended: mx.array = x + block.self_attn(block.input_layernorm(x), mask, cache)
    return attended


def _difference(x: mx.array, expected: mx.array, got: mx.array) -> float:
    """Relative to what the block adds to `x`, or to rounding if it adds next to nothing."""
    rounding = 32 * mx.finfo(x.dtype).eps
    x, expected, got = (each.astype(mx.float32) for each in (x, expected, got))
    scale = mx.maximum(mx.linalg.norm(expected - x), rounding * mx.linalg.norm(expected))
    return float((mx.linalg.norm(got - expected) / scale).item())  # type: ignore[arg-type]


def _random(block: Any, seed: int, *shape: int, last: int | None = None) -> mx.array:
    """Random numbers of the block's type; `last` is the size of the last axis, the hidden size unless told."""
    size = block.input_layernorm.weight.shape[0] if last is None else last
    numbers: mx.array = mx.random.normal((*shape, size), key=mx.random.key(seed))
    return numbers.astype(block.self_attn.o_proj.weight.dtype)


def _other_names(module: Any, needed: frozenset[str], allowed: frozenset[str] = frozenset()) -> str | None:
    """The names in which the code of a module differs from `needed`, but for those that are allowed besides; its
    arguments, if these are others than a block's. None if there are none."""
    call = _called(module)
    if call is None:
        return type(module).__name__
    code = call.__code__
    arguments = code.co_varnames[: code.co_argcount]
    if arguments != ARGUMENTS:
        return ", ".join(arguments)
    return ", ".join(sorted((set(code.co_names) ^ needed) - allowed)) or None


def _called(module: Any) -> types.FunctionType | None:
    call = next((vars(kind)["__call__"] for kind in type(module).__mro__ if "__call__" in vars(kind)), None)
    return call if isinstance(call, types.FunctionType) else None


def _head_norms(attention: Any) -> list[Any]:
    return [attention[name] for name in ("q_norm", "k_norm") if name in attention]
