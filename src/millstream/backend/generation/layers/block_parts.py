"""What a block's attention and MLP are made of, as data: read from their submodules, weights and attributes.

Families name the same things differently, so each thing has a list of names. What is read here is a guess:
`block_check` compares its numbers with those of the module before it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from millstream.backend.generation.layers.block_frame import Norm, NotUnderstood, is_norm, norm_of
from millstream.backend.layers.cpu_linear import MklLinear
from millstream.backend.layers.fused_matmul import Dense, Packed, Weight
from millstream.backend.layers.projections import joined_layer

QKV = ("q_proj", "k_proj", "v_proj")
JOINED_QKV = ("qkv_proj", "query_key_value", "Wqkv")
OUT = ("o_proj", "out_proj", "dense", "wo")
HEADS, GROUPS = ("n_heads", "num_attention_heads", "num_heads"), ("n_kv_heads", "num_key_value_heads", "num_kv_heads")
SCALE = ("scale", "sm_scale", "scaling")
ROPE = ("rope", "rotary_emb")
Q_NORM, K_NORM = ("q_norm", "q_layernorm", "query_layernorm"), ("k_norm", "k_layernorm", "key_layernorm")
SOFT_CAP = ("attn_logit_softcapping",)
GATE_AND_UP = (("gate_proj", "up_proj"), ("w1", "w3"))
JOINED_GATE_AND_UP = ("gate_up_proj", "gate_up")
DOWN = ("down_proj", "w2")
ACTIVATIONS = ("silu", "gelu_tanh", "gelu")
"""What a gate may go through; an MLP's own is found by its numbers."""


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """A rotary embedding: an angle of position / period for each pair of the first `size` numbers of a head."""

    periods: mx.array
    size: int
    traditional: bool = False
    """True if a pair stands side by side, not half a head apart."""
    factor: float = 1.0
    """What the rotated numbers are multiplied with (YaRN)."""

    def __call__(self, x: mx.array, offset: mx.array) -> mx.array:
        if self.factor != 1.0:
            whole = self.size == x.shape[-1]
            x = x * self.factor if whole else x.at[..., : self.size].multiply(self.factor)
        return mx.fast.rope(
            x, self.size, traditional=self.traditional, base=None, scale=1.0, offset=offset, freqs=self.periods
        )


@dataclass(frozen=True, slots=True, eq=False)
class AttentionParts:
    """Softmax attention with joined projections."""

    joined: Any
    out: Any
    heads: int
    groups: int
    size: int
    scale: float
    rope: Rope | None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    sinks: mx.array | None = None
    softcap: float | None = None
    gated: bool = False
    """True if each head of queries is followed by a gate of the same size, whose sigmoid the output is multiplied
    with."""

    @property
    def form(self) -> tuple[Any, ...]:
        """All of it that is not an array."""
        rope = None if self.rope is None else (self.rope.size, self.rope.traditional, self.rope.factor)
        normed = self.q_norm is not None
        return self.heads, self.groups, self.size, self.scale, rope, normed, self.softcap, self.gated

    @property
    def options(self) -> dict[str, Any]:
        """What attention is told besides queries, keys and values."""
        told: dict[str, Any] = {"scale": self.scale}
        if self.sinks is not None:
            told["sinks"] = self.sinks
        if self.softcap is not None:
            told["softcap"] = self.softcap
        return told


@dataclass(frozen=True, slots=True, eq=False)
class ConvParts:
    """A short convolution between two gates: see `kernels.short_conv`."""

    joined: Any
    out: Any
    weight: mx.array


@dataclass(frozen=True, slots=True, eq=False)
class GluParts:
    """down(activation(gate(x)) * up(x)), with gate and up in one layer."""

    joined: Any
    down: Any
    activation: str = "silu"


def projects_heads(mixer: Any) -> bool:
    """True if a mixer looks like attention: it projects to queries, keys and values."""
    return all(name in mixer for name in QKV) or _first(mixer, JOINED_QKV) is not None


def conv_parts(mixer: Any) -> ConvParts | None:
    """None if a mixer is no short convolution."""
    first, conv, out = mixer.get("in_proj"), mixer.get("conv"), _first(mixer, OUT)
    if not isinstance(conv, nn.Conv1d) or first is None or out is None or "bias" in conv:
        return None
    channels, kernel, each = conv.weight.shape
    if each != 1 or kernel < 2 or output_size(first) != 3 * channels or input_size(out) != channels:
        return None
    return ConvParts(first, out, conv.weight)


def attention_parts(attention: Any) -> AttentionParts:
    """Raises `NotUnderstood`."""
    joined = joined_layer(attention, QKV) or _first(attention, JOINED_QKV)
    if joined is None:
        raise NotUnderstood("has projections that were not joined")
    out = _first(attention, OUT)
    heads, groups = _attribute(attention, HEADS), _attribute(attention, GROUPS)
    scale = _attribute(attention, SCALE)
    if out is None or heads is None or scale is None:
        raise NotUnderstood("has other attention")
    groups = heads if groups is None else groups
    size = input_size(out) // heads
    gated = output_size(joined) == (2 * heads + 2 * groups) * size
    if output_size(joined) != (heads + 2 * groups) * size and not gated:
        raise NotUnderstood("has projections of other sizes")
    norms = [_head_norm(attention, names, size) for names in (Q_NORM, K_NORM)]
    if (norms[0] is None) != (norms[1] is None):
        raise NotUnderstood("has a norm of queries or of keys alone")
    cap = _attribute(attention, SOFT_CAP)
    return AttentionParts(
        joined,
        out,
        heads,
        groups,
        size,
        float(scale),
        _rope(attention),
        norms[0],
        norms[1],
        sinks=attention.get("sinks"),
        softcap=None if cap is None else float(cap),
        gated=gated,
    )


def glu_parts(mlp: Any) -> GluParts | None:
    """None if the MLP is another kind: experts, or without a gate."""
    joined = next((found for names in GATE_AND_UP if (found := joined_layer(mlp, names)) is not None), None)
    joined = joined if joined is not None else _first(mlp, JOINED_GATE_AND_UP)
    down = _first(mlp, DOWN)
    if joined is None or down is None or output_size(joined) != 2 * input_size(down):
        return None
    return GluParts(joined, down)


def block_dtype(block: Any) -> mx.Dtype:
    """The type that a block computes in: that of its plain weights, else of its norms."""
    arrays = [value for _, module in block.named_modules() for value in module.values() if isinstance(value, mx.array)]
    plain = [array.dtype for array in arrays if array.ndim >= 2 and mx.issubdtype(array.dtype, mx.floating)]
    others = [array.dtype for array in arrays if mx.issubdtype(array.dtype, mx.floating)]
    return (plain or others or [mx.float32])[0]


def has_experts(module: Any) -> bool:
    """True if a router chooses among the weights in it."""
    arrays = [value for _, each in module.named_modules() for value in each.values() if isinstance(value, mx.array)]
    return any("switch" in name for name, _ in module.named_modules()) or any(
        array.ndim == 3 and array.shape[2] > 8 for array in arrays
    )


def weight_of(layer: Any) -> Weight | None:
    """The weight of a linear layer, plain or quantised; None for other modules."""
    if isinstance(layer, nn.QuantizedLinear):
        biases = layer.get("biases")
        return Packed(layer["weight"], layer["scales"], biases, layer.bits, layer.group_size, layer.mode)
    return Dense(layer["weight"]) if isinstance(layer, nn.Linear | MklLinear) else None


def output_size(layer: Any) -> int:
    weight = weight_of(layer)
    return 0 if weight is None else weight.outputs


def input_size(layer: Any) -> int:
    weight = weight_of(layer)
    return 0 if weight is None else weight.inputs


def read_rope(rope: Any) -> Rope | None:
    """A rotary embedding as data; None for kinds that are not known."""
    size = getattr(rope, "dims", getattr(rope, "dim", None))
    if size is None:
        return None
    traditional = bool(getattr(rope, "traditional", False))
    factor = float(getattr(rope, "mscale", getattr(rope, "_scale", 1.0)))
    if isinstance(freqs := getattr(rope, "_freqs", None), mx.array):
        periods = freqs.astype(mx.float32)
    elif isinstance(rope, nn.RoPE):
        periods = rope.base ** (mx.arange(0, size, 2, dtype=mx.float32) / size) / rope.scale
    else:
        return None
    mx.eval(periods)
    return Rope(periods, int(size), traditional, factor)


def rope_module(attention: Any) -> Any:
    return _first(attention, ROPE)


def _rope(attention: Any) -> Rope | None:
    module = rope_module(attention)
    if module is None or _is_identity(module):
        return None
    rope = read_rope(module)
    if rope is None:
        raise NotUnderstood(f"has another rotary embedding ({type(module).__name__})")
    return rope


def _is_identity(rope: Any) -> bool:
    """True for layers without positions (SmolLM 3)."""
    x = mx.random.normal((1, 1, 1, 256), key=mx.random.key(8))
    return bool(mx.array_equal(rope(x, offset=1000), x).item())


def _head_norm(attention: Any, names: Sequence[str], size: int) -> Norm | None:
    module = _first(attention, names)
    if module is None:
        return None
    norm = norm_of(module) if is_norm(module) and module["weight"].shape == (size,) else None
    if norm is None or norm.weight is None:
        raise NotUnderstood(f"has norms of its own ({type(module).__name__})")
    return norm


def _first(module: Any, names: Sequence[str]) -> Any:
    return next((module[name] for name in names if isinstance(module.get(name), nn.Module)), None)


def _attribute(module: Any, names: Sequence[str]) -> Any:
    return next((value for name in names if (value := getattr(module, name, None)) is not None), None)
