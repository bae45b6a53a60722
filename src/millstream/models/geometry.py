"""What a model's configuration tells of its shape: how far it reads, and what it keeps of every token.

These functions read what others wrote, so they raise `ValueError` with what is wrong; whoever knows the file names it.
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
_KINDS = ("hybrid_override_pattern", "layers_block_type", "layer_types", "block_types", "_block_types")

_RECURRENT = frozenset({"mamba", "mamba2", "falcon_mamba", "rwkv7"})
"""Models without any attention."""
_KEEP_NOTHING = frozenset({"mamba", "mamba2", "recurrent", "linear_attention", "conv", "conv_mixer", "mlp", "moe"})
_KEEP_NOTHING_SHORT = frozenset("M-E")
"""Kinds of layers that keep no keys, and their letters in Nemotron's pattern. A kind that is not known here counts."""
_WHOLE_HEADS = frozenset({"deepseek_v2", "minicpm3", "youtu_llm"})
"""Latent attention whose keys and values mlx-lm caches unfolded, a pair for each head."""
_TWICE = frozenset({"longcat_flash", "longcat_flash_ngram"})
"""Two attentions a layer."""


def text_part(config: Config) -> dict[str, Any]:
    """The language model's own settings: those of a model that also sees lie a level deeper."""
    return {**config, **(config.get("text_config") or {})}


def context_length(config: Config) -> int | None:
    text = config.get("text_config") or {}
    for name in _LENGTHS:
        value = config.get(name) or text.get(name)
        if isinstance(value, int) and value > 0:
            return value
    return None


def kv_values_per_token(config: Config, widths: Mapping[int, int]) -> int:
    """How many numbers a token leaves behind in all layers' caches.

    `widths` is what the weights show: by layer, how many numbers its keys and values have. It may be empty, and is
    believed before the configuration, which may leave out what is usual for its family. Sliding windows count in full.
    """
    text = text_part(config)
    if text.get("model_type") in _RECURRENT:
        return 0
    count = _number(text, *_LAYERS) or len(_kinds(text) or ())
    if not count:
        raise ValueError(f"names no {_LAYERS[0]}")
    keeps = _rule(text, count)
    # Gemma 3n and 4: the last layers read what earlier ones keep.
    layers = [layer for layer in range(count - (text.get("num_kv_shared_layers") or 0)) if keeps(layer)]
    if text.get("kv_lora_rank"):
        return len(layers) * _latent(text)
    if widths:
        return sum(widths.get(layer, 0) for layer in layers)
    return _from_heads(text, layers)


def kv_group_size(config: Config) -> int:
    """How many keys or values share a scale once they are quantised: 64 where the heads are multiples of that. A
    configuration that leaves out the size of its heads is taken for one of 32, which takes more."""
    text = text_part(config)
    key = _head_size(text)
    return 64 if key and key % 64 == 0 and (_number(text, "v_head_dim") or key) % 64 == 0 else 32


def _head_size(text: Config) -> int | None:
    heads, hidden = _number(text, *_HEADS), _number(text, *_HIDDEN)
    return _number(text, "head_dim") or (hidden // heads if hidden and heads else None)


def _from_heads(text: Config, layers: list[int]) -> int:
    key = _head_size(text)
    named = next((text[name] for name in _KV_HEADS if text.get(name) is not None), _number(text, *_HEADS))
    if key is None or named is None:
        raise ValueError(f"names no {_HEADS[0] if named is None else _HIDDEN[0]}")
    by_layer = named if isinstance(named, list) else [named] * (max(layers, default=0) + 1)
    return sum(int(by_layer[layer]) for layer in layers) * (key + (_number(text, "v_head_dim") or key))


def _latent(text: Config) -> int:
    """Multi-head latent attention: one vector for all heads and one with the positions. DeepSeek V3.2's indexer has
    keys besides, which mlx-lm stores with values of the same size."""
    rotated, whole = _number(text, "qk_rope_head_dim") or 0, _number(text, "qk_nope_head_dim") or 0
    kind = text.get("model_type")
    if kind in _WHOLE_HEADS:
        heads, hidden = _number(text, *_HEADS) or 0, _number(text, *_HIDDEN) or 0
        return heads * (whole + rotated + (_number(text, "v_head_dim") or hidden // heads))
    kept = text["kv_lora_rank"] + rotated + 2 * (text.get("index_head_dim") or 0)
    return int(kept) * (2 if kind in _TWICE else 1)


def _kinds(text: Config) -> Any:
    """The list, or the string of letters, that says of each layer what it is."""
    return next((text[name] for name in _KINDS if text.get(name)), None)


def _rule(text: Config, count: int) -> Callable[[int], bool]:
    """Which layers keep keys and values: as the configuration says it, in one of the ways of the hybrid families."""
    if indices := text.get("full_attn_idxs"):
        return lambda layer: layer in indices
    if kinds := _kinds(text):
        nothing = _KEEP_NOTHING_SHORT if len(kinds[0]) == 1 else _KEEP_NOTHING
        return lambda layer: kinds[layer % len(kinds)] not in nothing
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
    """The first of these settings that is there."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} is {value!r}; a whole number above 0 is needed")
        return value
    return None
