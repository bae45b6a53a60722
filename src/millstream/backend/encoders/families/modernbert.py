"""ModernBERT: rotary positions, gated feed-forward, attention within a window in most layers."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from millstream.backend.encoders.families.parts import LayerNorm, Linear, Tensors, attend
from millstream.models.encoder_config import ModernBertConfig


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: LayerNorm | None
    qkv: Linear
    output: Linear
    norm: LayerNorm
    up: Linear
    down: Linear
    is_global: bool


class ModernBert:
    """Tokens to hidden states."""

    max_tokens: int | None = None

    def __init__(self, settings: Mapping[str, Any], tensors: Tensors) -> None:
        self._operations = tensors.operations
        config = self._config = ModernBertConfig.read(settings)
        prefix = tensors.find_prefix(("model.",), "embeddings.tok_embeddings.weight")
        self._words = tensors.tensor(f"{prefix}embeddings.tok_embeddings.weight")
        self.vocab_size = len(self._words)
        self._norm = tensors.norm(f"{prefix}embeddings.norm", config.eps)
        self._activation = tensors.operations.activation(config.activation)
        self._layers = [_layer(tensors, f"{prefix}layers.{n}.", n, config) for n in range(config.layers)]
        self._final_norm = tensors.norm(f"{prefix}final_norm", config.eps)

    def __call__(self, ids: mx.array, keep: mx.array | None, types: mx.array | None) -> mx.array:
        config = self._config
        x = self._norm(self._words[ids])
        length = ids.shape[1]
        mask = None if keep is None else keep[:, None, None, :]
        near_mask = mask
        if length > config.window // 2 + 1:
            places = mx.arange(length)
            near = mx.abs(places[:, None] - places[None, :]) <= config.window // 2
            near_mask = near[None, None] if mask is None else near[None, None] & mask
        for layer in self._layers:
            rotate = functools.partial(_rotate, theta=config.global_theta if layer.is_global else config.local_theta)
            inner = x if layer.attention_norm is None else layer.attention_norm(x)
            attended = attend(
                self._operations, layer.qkv(inner), config.heads, mask if layer.is_global else near_mask, rotate
            )
            x = x + layer.output(attended)
            gated, gate = mx.split(layer.up(layer.norm(x)), 2, axis=-1)
            x = x + layer.down(self._activation(gated) * gate)
        return self._final_norm(x)


def _layer(tensors: Tensors, at: str, number: int, config: ModernBertConfig) -> _Layer:
    return _Layer(
        tensors.norm(f"{at}attn_norm", config.eps) if tensors.has(f"{at}attn_norm.weight") else None,
        tensors.linear(f"{at}attn.Wqkv"),
        tensors.linear(f"{at}attn.Wo"),
        tensors.norm(f"{at}mlp_norm", config.eps),
        tensors.linear(f"{at}mlp.Wi"),
        tensors.linear(f"{at}mlp.Wo"),
        number in config.global_layers,
    )


def _rotate(x: mx.array, theta: float) -> mx.array:
    return mx.fast.rope(x, x.shape[-1], traditional=False, base=theta, scale=1.0, offset=0)
