"""Derives context length and KV cache size per token from a model's configuration.

Configurations are untrusted: these functions raise `ValueError` with the reason, and the caller adds the file's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Config = Mapping[str, Any]

_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "model_max_length")
_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "num_transformer_layers")
_HEADS = ("num_attention_heads", "n_heads", "n_head")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_HIDDEN = ("hidden_size", "d_model", "n_embd")
_LAYER_KINDS = ("hybrid_override_pattern", "layers_block_type", "layer_types", "block_types", "_block_types")

_RECURRENT = frozenset({"mamba", "mamba2", "falcon_mamba", "rwkv7"})
"""Models without any attention."""
_NO_KV_KINDS = frozenset({"mamba", "mamba2", "recurrent", "linear_attention", "conv", "conv_mixer", "mlp", "moe"})
_NO_KV_LETTERS = frozenset("M-E")
"""Kinds of layers without a KV cache, and their letters in Nemotron's pattern. Unknown kinds count as having one."""
_MLA_PER_HEAD = frozenset({"deepseek_v2", "minicpm3", "youtu_llm"})
"""Latent attention whose KV cache mlx-lm stores decompressed, per head."""
_TWO_ATTENTIONS = frozenset({"longcat_flash", "longcat_flash_ngram"})
"""Families with two attentions per layer."""


def text_part(config: Config) -> dict[str, Any]:
    """The language model's settings: a vision-language model has them in `text_config`."""
    return {**config, **(config.get("text_config") or {})}


def context_length(config: Config) -> int | None:
    text = config.get("text_config") or {}
    for name in _LENGTHS:
        value = config.get(name) or text.get(name)
        if isinstance(value, int) and value > 0:
            return value
    return None


def kv_values_per_token(config: Config, widths: Mapping[int, int]) -> int:
    """KV cache values per token, in all layers together.

    `widths` comes from the weights: by layer, the values of its keys and values per token. It may be empty. It takes
    precedence over the configuration, which may omit its family's defaults. Sliding windows count in full.
    """
    text = text_part(config)
    if text.get("model_type") in _RECURRENT:
        return 0
    count = _number(text, *_LAYERS) or len(_layer_kinds(text) or ())
    if not count:
        raise ValueError(f"has no {_LAYERS[0]}")
    has_kv = _layers_with_kv(text, count)
    # Gemma 3n and 4: the last layers share the KV cache of earlier ones.
    layers = [layer for layer in range(count - (text.get("num_kv_shared_layers") or 0)) if has_kv(layer)]
    if text.get("kv_lora_rank"):
        return len(layers) * _latent_values(text)
    if widths:
        return sum(widths.get(layer, 0) for layer in layers)
    return _from_heads(text, layers)


def kv_group_size(config: Config) -> int:
    """Group size of a quantised KV cache: 64 if the head sizes are multiples of 64, else 32. Without a head size in the
    configuration, 32 is assumed, which takes more memory."""
    text = text_part(config)
    key_dim = _head_size(text)
    return 64 if key_dim and key_dim % 64 == 0 and (_number(text, "v_head_dim") or key_dim) % 64 == 0 else 32


def _head_size(text: Config) -> int | None:
    heads, hidden = _number(text, *_HEADS), _number(text, *_HIDDEN)
    return _number(text, "head_dim") or (hidden // heads if hidden and heads else None)


def _from_heads(text: Config, layers: list[int]) -> int:
    key_dim = _head_size(text)
    kv_heads = next((text[name] for name in _KV_HEADS if text.get(name) is not None), _number(text, *_HEADS))
    if key_dim is None or kv_heads is None:
        raise ValueError(f"has no {_HEADS[0] if kv_heads is None else _HIDDEN[0]}")
    by_layer = kv_heads if isinstance(kv_heads, list) else [kv_heads] * (max(layers, default=0) + 1)
    return sum(int(by_layer[layer]) for layer in layers) * (key_dim + (_number(text, "v_head_dim") or key_dim))


def _latent_values(text: Config) -> int:
    """Multi-head latent attention, per layer: one latent vector for all heads and one with RoPE. DeepSeek V3.2 also
    caches the keys of its indexer, which mlx-lm stores together with values of the same size."""
    rope_dim, nope_dim = _number(text, "qk_rope_head_dim") or 0, _number(text, "qk_nope_head_dim") or 0
    kind = text.get("model_type")
    if kind in _MLA_PER_HEAD:
        heads, hidden = _number(text, *_HEADS) or 0, _number(text, *_HIDDEN) or 0
        return heads * (nope_dim + rope_dim + (_number(text, "v_head_dim") or hidden // heads))
    values = text["kv_lora_rank"] + rope_dim + 2 * (text.get("index_head_dim") or 0)
    return int(values) * (2 if kind in _TWO_ATTENTIONS else 1)


def _layer_kinds(text: Config) -> Any:
    """The kind of each layer: a list of names or a string of letters."""
    return next((text[name] for name in _LAYER_KINDS if text.get(name)), None)


def _layers_with_kv(text: Config, count: int) -> Callable[[int], bool]:
    """Tells whether a layer has a KV cache. Every hybrid family describes that in its own way."""
    if indices := text.get("full_attn_idxs"):
        return lambda layer: layer in indices
    if kinds := _layer_kinds(text):
        without_kv = _NO_KV_LETTERS if len(kinds[0]) == 1 else _NO_KV_KINDS
        return lambda layer: kinds[layer % len(kinds)] not in without_kv
    if period := text.get("attn_layer_period"):
        return lambda layer: bool(layer % period == text.get("attn_layer_offset", 0))
    if interval := text.get("full_attention_interval"):
        return lambda layer: (layer + 1) % interval == 0
    if group := text.get("layer_group_size"):
        return lambda layer: (layer + 1) % group == 0 or layer >= count // group * group
    if linear := (text.get("linear_attn_config") or {}).get("kda_layers"):
        return lambda layer: layer + 1 not in linear
    return lambda layer: True


def _number(config: Config, *names: str) -> int | None:
    """The first of these settings that is present. Returns None if none is."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} is {value!r}; it must be a whole number above 0")
        return value
    return None
