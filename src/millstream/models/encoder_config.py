"""The settings of encoder families, read from config.json. No MLX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream.errors import ModelError

BERT_FAMILIES = ("bert", "electra", "roberta", "xlm-roberta", "camembert", "mpnet", "distilbert")
_FROM_PAD_TOKEN = ("roberta", "xlm-roberta", "camembert", "mpnet")
"""Their first position is the one after the padding token's id."""

FAMILIES = (*BERT_FAMILIES, "modernbert", "nomic_bert")
"""Encoders that are loaded by modules of our own."""
CAUSAL_FAMILIES = ("qwen3", "qwen2", "llama", "mistral", "gemma", "gemma2", "phi3", "lfm2")
"""Language models of mlx-lm that are published as embedding models, with attention to earlier tokens only."""
BIDIRECTIONAL_FAMILIES = ("gemma3_text",)
"""Language models that are published as embedding models with attention in both directions."""


@dataclass(frozen=True, slots=True)
class BertConfig:
    family: str
    layers: int
    heads: int
    eps: float
    activation: str
    positions: int
    first_position: int

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> BertConfig:
        family = family_of(settings)
        distil = family == "distilbert"
        if settings.get("position_embedding_type", "absolute") != "absolute":
            raise ModelError(
                f"config.json: position_embedding_type {settings['position_embedding_type']!r} is not supported"
            )
        padding = settings.get("pad_token_id")
        first = (padding if type(padding) is int else 1) + 1 if family in _FROM_PAD_TOKEN else 0
        return cls(
            family,
            layers=_number(settings, "n_layers" if distil else "num_hidden_layers"),
            heads=_number(settings, "n_heads" if distil else "num_attention_heads"),
            eps=float(settings.get("layer_norm_eps", 1e-12)),
            activation=settings.get("activation" if distil else "hidden_act", "gelu"),
            positions=_number(settings, "max_position_embeddings") - first,
            first_position=first,
        )


@dataclass(frozen=True, slots=True)
class ModernBertConfig:
    layers: int
    heads: int
    eps: float
    activation: str
    window: int
    global_layers: frozenset[int]
    global_theta: float
    local_theta: float

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> ModernBertConfig:
        layers = _number(settings, "num_hidden_layers")
        every = int(settings.get("global_attn_every_n_layers", 3))
        types = settings.get("layer_types")
        if isinstance(types, list):
            chosen = frozenset(number for number, name in enumerate(types) if name == "full_attention")
        else:
            chosen = frozenset(range(0, layers, max(every, 1)))
        global_theta = _theta(settings, "full_attention", settings.get("global_rope_theta", 160_000.0))
        return cls(
            layers,
            heads=_number(settings, "num_attention_heads"),
            eps=float(settings.get("norm_eps", 1e-5)),
            activation=settings.get("hidden_activation", "gelu"),
            window=int(settings.get("local_attention", 128)),
            global_layers=chosen,
            global_theta=global_theta,
            local_theta=_theta(
                settings, "sliding_attention", settings.get("local_rope_theta", 10_000.0) or global_theta
            ),
        )


@dataclass(frozen=True, slots=True)
class NomicConfig:
    layers: int
    heads: int
    eps: float
    theta: float
    rotary_dims: int

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> NomicConfig:
        for key, wanted in (("activation_function", "swiglu"), ("prenorm", False), ("rotary_emb_interleaved", False)):
            if settings.get(key, wanted) != wanted:
                raise ModelError(
                    f"config.json: {key} is {settings[key]!r}; only {wanted!r} is supported for Nomic's BERT"
                )
        heads = _number(settings, "n_head")
        width = _number(settings, "n_embd") // heads
        return cls(
            layers=_number(settings, "n_layer"),
            heads=heads,
            eps=float(settings.get("layer_norm_epsilon", 1e-12)),
            theta=float(settings.get("rotary_emb_base", 10_000)),
            rotary_dims=int(width * float(settings.get("rotary_emb_fraction", 1.0))),
        )


def family_of(settings: Mapping[str, Any]) -> str:
    """`model_type` in one spelling."""
    name = str(settings.get("model_type", "")).lower()
    return {"xlm_roberta": "xlm-roberta", "nomic-bert": "nomic_bert"}.get(name, name)


def most_tokens(settings: Mapping[str, Any]) -> int | None:
    """The most tokens that the model's positions allow. None if the configuration does not say."""
    if family_of(settings) in BERT_FAMILIES:
        return BertConfig.read(settings).positions
    for key in ("max_position_embeddings", "max_trained_positions", "n_positions"):
        if isinstance(settings.get(key), int):
            return int(settings[key])
    return None


def config_file(folder: Path) -> Path:
    return folder / "config.json"


def _theta(settings: Mapping[str, Any], layers: str, default: Any) -> float:
    """The base of rotary positions, in the form that transformers 5 writes; `default` if there is none."""
    parameters = settings.get("rope_parameters")
    found = parameters.get(layers) if isinstance(parameters, dict) else None
    theta = found.get("rope_theta") if isinstance(found, dict) else None
    return float(default if theta is None else theta)


def _number(settings: Mapping[str, Any], key: str) -> int:
    value = settings.get(key)
    if type(value) is not int or value < 1:
        raise ModelError(f"config.json: {key} is {value!r}; it must be a whole number above 0")
    return value
