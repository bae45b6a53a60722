"""Nomic's BERT: rotary positions and a gated feed-forward, normalised after each block."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from millstream.backend.encoders.families.parts import LayerNorm, Linear, Tensors, attend
from millstream.models.encoder_config import NomicConfig


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: Linear
    output: Linear
    attention_norm: LayerNorm
    up: Linear
    gate: Linear
    down: Linear
    norm: LayerNorm


class NomicBert:
    """Tokens to hidden states."""

    max_tokens: int | None = None

    def __init__(self, settings: Mapping[str, Any], tensors: Tensors) -> None:
        self._operations = tensors.operations
        config = self._config = NomicConfig.read(settings)
        prefix = tensors.find_prefix(("bert.",), "embeddings.word_embeddings.weight")
        self._words = tensors.tensor(f"{prefix}embeddings.word_embeddings.weight")
        self.vocab_size = len(self._words)
        self._types = tensors.tensor(f"{prefix}embeddings.token_type_embeddings.weight")
        self._norm = tensors.norm(f"{prefix}emb_ln", config.eps)
        self._layers = [_layer(tensors, f"{prefix}encoder.layers.{n}.", config.eps) for n in range(config.layers)]

    def __call__(self, ids: mx.array, keep: mx.array | None, types: mx.array | None) -> mx.array:
        config = self._config
        x = self._norm(self._words[ids] + (self._types[0] if types is None else self._types[types]))
        mask = None if keep is None else keep[:, None, None, :]
        rotate = functools.partial(
            mx.fast.rope, dims=config.rotary_dims, traditional=False, base=config.theta, scale=1.0, offset=0
        )
        silu = self._operations.activations["silu"]
        for layer in self._layers:
            x = layer.attention_norm(
                layer.output(attend(self._operations, layer.qkv(x), config.heads, mask, rotate)) + x
            )
            x = layer.norm(layer.down(layer.up(x) * silu(layer.gate(x))) + x)
        return x


def _layer(tensors: Tensors, at: str, eps: float) -> _Layer:
    return _Layer(
        tensors.linear(f"{at}attn.Wqkv"),
        tensors.linear(f"{at}attn.out_proj"),
        tensors.norm(f"{at}norm1", eps),
        tensors.linear(f"{at}mlp.fc11"),
        tensors.linear(f"{at}mlp.fc12"),
        tensors.linear(f"{at}mlp.fc2"),
        tensors.norm(f"{at}norm2", eps),
    )
