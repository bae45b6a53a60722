"""BERT and its kin: RoBERTa, XLM-RoBERTa, CamemBERT, MPNet, DistilBERT, ELECTRA."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from millstream.backend.encoders.families.parts import LayerNorm, Linear, Tensors, attend
from millstream.models.encoder_config import BertConfig


@dataclass(frozen=True, slots=True)
class Names:
    """What a family calls its tensors. `{}` stands for the number of a layer."""

    prefixes: tuple[str, ...]
    layer: str = "encoder.layer.{}."
    query: str = "attention.self.query"
    key: str = "attention.self.key"
    value: str = "attention.self.value"
    output: str = "attention.output.dense"
    output_norm: str = "attention.output.LayerNorm"
    up: str = "intermediate.dense"
    down: str = "output.dense"
    norm: str = "output.LayerNorm"


_BERT = Names(("bert.", "electra."))
_ROBERTA = Names(("roberta.", "camembert."))
NAMES = {
    "bert": _BERT,
    "electra": _BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "mpnet": Names(
        ("mpnet.",),
        query="attention.attn.q",
        key="attention.attn.k",
        value="attention.attn.v",
        output="attention.attn.o",
        output_norm="attention.LayerNorm",
    ),
    "distilbert": Names(
        ("distilbert.",),
        layer="transformer.layer.{}.",
        query="attention.q_lin",
        key="attention.k_lin",
        value="attention.v_lin",
        output="attention.out_lin",
        output_norm="sa_layer_norm",
        up="ffn.lin1",
        down="ffn.lin2",
        norm="output_layer_norm",
    ),
}


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: Linear
    output: Linear
    output_norm: LayerNorm
    up: Linear
    down: Linear
    norm: LayerNorm


class Bert:
    """Tokens to hidden states."""

    def __init__(self, settings: Mapping[str, Any], tensors: Tensors) -> None:
        self._operations = tensors.operations
        config = self._config = BertConfig.read(settings)
        names = NAMES[config.family]
        prefix = tensors.find_prefix(names.prefixes, "embeddings.word_embeddings.weight")
        embeddings = f"{prefix}embeddings."
        self._words = tensors.tensor(f"{embeddings}word_embeddings.weight")
        self.vocab_size = len(self._words)
        self._positions = tensors.tensor(f"{embeddings}position_embeddings.weight")
        types = f"{embeddings}token_type_embeddings.weight"
        self._types = tensors.tensor(types) if tensors.has(types) else None
        self._norm = tensors.norm(f"{embeddings}LayerNorm", config.eps)
        self._widen = (
            tensors.linear(f"{prefix}embeddings_project")
            if config.family == "electra" and tensors.has(f"{prefix}embeddings_project.weight")
            else None
        )
        self._activation = tensors.operations.activation(config.activation)
        self._layers = [
            _layer(tensors, names, f"{prefix}{names.layer.format(number)}", config.eps)
            for number in range(config.layers)
        ]
        self._relative = None
        if config.family == "mpnet":
            self._relative = tensors.tensor(f"{prefix}encoder.relative_attention_bias.weight")

    @property
    def max_tokens(self) -> int | None:
        return len(self._positions) - self._config.first_position

    def __call__(self, ids: mx.array, keep: mx.array | None, types: mx.array | None) -> mx.array:
        """`keep`: True for tokens, False for padding; None if there is none. `types`: 0 or 1 for each token."""
        length = ids.shape[1]
        x = self._words[ids] + self._positions[mx.arange(length) + self._config.first_position]
        if self._types is not None:
            x = x + (self._types[0] if types is None else self._types[types])
        x = self._norm(x)
        if self._widen is not None:
            x = self._widen(x)
        mask = None if keep is None else keep[:, None, None, :]
        if self._relative is not None:
            bias = relative_bias(self._relative, length)
            mask = bias if mask is None else mx.where(mask, bias, mx.finfo(bias.dtype).min)
        for layer in self._layers:
            attended = attend(self._operations, layer.qkv(x), self._config.heads, mask)
            x = layer.output_norm(layer.output(attended) + x)
            x = layer.norm(layer.down(self._activation(layer.up(x))) + x)
        return x


def _layer(tensors: Tensors, names: Names, at: str, eps: float) -> _Layer:
    return _Layer(
        tensors.linear(at + names.query, at + names.key, at + names.value),
        tensors.linear(at + names.output),
        tensors.norm(at + names.output_norm, eps),
        tensors.linear(at + names.up),
        tensors.linear(at + names.down),
        tensors.norm(at + names.norm, eps),
    )


def relative_bias(table: mx.array, length: int, max_distance: int = 128) -> mx.array:
    """MPNet's (and T5's) bias for each head and distance: exact for near positions, in logarithmic steps beyond.
    Shape (1, heads, length, length)."""
    half = table.shape[0] // 2
    exact = half // 2
    distance = mx.arange(length)[None, :] - mx.arange(length)[:, None]  # of a key from a query
    apart = mx.abs(distance)
    steps = mx.log(mx.maximum(apart, 1).astype(mx.float32) / exact) / math.log(max_distance / exact) * (half - exact)
    far = mx.minimum(exact + steps.astype(mx.int32), half - 1)
    bucket = mx.where(apart < exact, apart, far) + mx.where(distance > 0, half, 0)
    return table[bucket].transpose(2, 0, 1)[None]
