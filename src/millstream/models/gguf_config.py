"""Translates a GGUF file's metadata into an mlx-lm configuration, as config.json would have it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from millstream.errors import ModelError
from millstream.models.gguf_file import GgufFile
from millstream.models.gguf_names import ARCHITECTURES
from millstream.models.gguf_vocabulary import read_vocabulary, token_id

END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>")
"""End-of-turn tokens of the common chat formats. A file often declares only one of the two that it has."""

_SPECIAL_TYPES = (3, 4)
"""Token types: control and user-defined."""


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """The configuration for `mlx_lm.models.<model_type>.ModelArgs.from_dict`."""
    if file.architecture not in ARCHITECTURES:
        raise ModelError(
            f"{file.path}: architecture {file.architecture or 'missing'!r} is not supported as GGUF. "
            f"Supported are: {', '.join(ARCHITECTURES)}."
        )
    config = _common(file)
    _FAMILIES[file.architecture](file, config)
    try:
        config["eos_token_id"] = sorted(eos_token_ids(file.metadata))
    except ModelError as error:
        raise ModelError(f"{file.path}: {error.message}") from error
    return config


def eos_token_ids(metadata: Mapping[str, Any]) -> frozenset[int]:
    """All tokens that end a completion: those that the file declares, and the common end-of-turn tokens that it has."""
    vocabulary = read_vocabulary(metadata)
    declared = (token_id(metadata, role, len(vocabulary.tokens)) for role in ("eos", "eot", "eom"))
    special = (index for index, kind in enumerate(vocabulary.types) if kind in _SPECIAL_TYPES)
    end_of_turn = {index for index in special if vocabulary.tokens[index] in END_OF_TURN}
    return frozenset({number for number in declared if number is not None} | end_of_turn)


def _common(file: GgufFile) -> dict[str, Any]:
    heads = _count(file, "attention.head_count")
    hidden = _count(file, "embedding_length")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path}: has no tensor 'token_embd.weight', so it is not a complete language model.")
    if len(embedding.shape) != 2:
        raise ModelError(
            f"{file.path}: 'token_embd.weight' has the shape {list(embedding.shape)}; it must have two axes."
        )
    return {
        "hidden_size": hidden,
        "num_hidden_layers": _count(file, "block_count"),
        "intermediate_size": _count(file, "feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": _count(file, "attention.head_count_kv", heads),
        "head_dim": _count(file, "attention.key_length", max(hidden // heads, 1)),
        "rms_norm_eps": _number(file, "attention.layer_norm_rms_epsilon"),
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": _count(file, "context_length"),
        "rope_theta": _number(file, "rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }


def _llama(file: GgufFile, config: dict[str, Any]) -> None:
    if file.hyper("expert_count", 0):
        raise ModelError(f"{file.path}: mixture-of-experts models of architecture 'llama' are not supported as GGUF.")
    _require_full_rope(file, config)
    config["model_type"] = "llama"
    # The rows of q and k are in the order of the first Llama release: RoPE rotates neighbouring values as pairs.
    config["rope_traditional"] = True
    config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors


def _qwen2(file: GgufFile, config: dict[str, Any]) -> None:
    _require_full_rope(file, config)
    config["model_type"] = "qwen2"


def _qwen3(file: GgufFile, config: dict[str, Any]) -> None:
    _require_full_rope(file, config)
    config["model_type"] = "qwen3"


def _qwen3moe(file: GgufFile, config: dict[str, Any]) -> None:
    _require_full_rope(file, config)
    if config["rope_scaling"]:
        raise ModelError(f"{file.path}: RoPE scaling is not supported for 'qwen3moe'. Use a file without it.")
    config.update(
        model_type="qwen3_moe",
        num_experts=_count(file, "expert_count"),
        num_experts_per_tok=_count(file, "expert_used_count"),
        moe_intermediate_size=_count(file, "expert_feed_forward_length"),
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
    )


def _gemma3(file: GgufFile, config: dict[str, Any]) -> None:
    if file.hyper("final_logit_softcapping", 0.0):
        raise ModelError(f"{file.path}: logit softcapping is not supported for 'gemma3'.")
    window = _count(file, "attention.sliding_window", 0)
    pattern = file.hyper("attention.sliding_window_pattern", 6)
    pattern = (
        _period(file, pattern) if isinstance(pattern, list) else _count(file, "attention.sliding_window_pattern", 6)
    )
    # Queries are scaled by the head size, except in the 27B model, which is recognised by its 62 layers.
    is_27b = config["num_hidden_layers"] == 62
    scalar = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    config.update(
        model_type="gemma3_text",
        rope_local_base_freq=_number(file, "rope.freq_base_swa", 10000.0),
        query_pre_attn_scalar=scalar,
        sliding_window=window or config["max_position_embeddings"],
        sliding_window_pattern=pattern if window else 1,
    )


def _period(file: GgufFile, sliding: list[bool]) -> int:
    """The period of the layer pattern. `sliding`: per layer, True if it has a sliding window."""
    period = sliding.index(False) + 1 if False in sliding else len(sliding)
    if sliding != [(layer + 1) % period != 0 for layer in range(len(sliding))]:
        raise ModelError(
            f"{file.path}: only sliding-window patterns in which every n-th layer has full attention are supported."
        )
    return period


def _phi3(file: GgufFile, config: dict[str, Any]) -> None:
    config["model_type"] = "phi3"
    config["partial_rotary_factor"] = _count(file, "rope.dimension_count", config["head_dim"]) / config["head_dim"]
    trained = _count(file, "rope.scaling.original_context_length", config["max_position_embeddings"])
    config["original_max_position_embeddings"] = trained
    long, short = (file.tensors.get(f"rope_factors_{name}.weight") for name in ("long", "short"))
    if long is not None and short is not None:
        config["rope_scaling"] = {
            "type": "longrope",
            "long_factor": long.floats().tolist(),
            "short_factor": short.floats().tolist(),
            "original_max_position_embeddings": trained,
        }


_FAMILIES: dict[str, Callable[[GgufFile, dict[str, Any]], None]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3moe,
    "gemma3": _gemma3,
    "phi3": _phi3,
}


def _rope_scaling(file: GgufFile) -> dict[str, Any] | None:
    """Linear and YaRN scaling. Per-frequency factors come as a tensor, which the weight loader applies."""
    kind = file.hyper("rope.scaling.type", "linear")
    factor = _number(file, "rope.scaling.factor", _number(file, "rope.scale_linear", 1.0))
    if kind in ("none", "longrope") or factor in (0.0, 1.0):
        return None
    if kind not in ("linear", "yarn"):
        raise ModelError(
            f"{file.path}: RoPE scaling {kind!r} is not supported. Supported are: none, linear, yarn, longrope."
        )
    scaling: dict[str, Any] = {"type": kind, "factor": float(factor)}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = _count(file, "rope.scaling.original_context_length")
    return scaling


def _require_full_rope(file: GgufFile, config: dict[str, Any]) -> None:
    rotated = file.hyper("rope.dimension_count", config["head_dim"])
    if rotated != config["head_dim"]:
        raise ModelError(
            f"{file.path}: RoPE rotates {rotated} of {config['head_dim']} values of a head; "
            f"for {file.architecture!r} it must rotate all of them."
        )


def _count(file: GgufFile, key: str, default: int | None = None) -> int:
    """A whole number above 0, or the default. Raises `ModelError` otherwise."""
    value = _uniform(file, key, default)
    if type(value) is not int or (value < 1 and value != default):
        raise ModelError(
            f"{file.path}: '{file.architecture}.{key}' is {value!r:.60}; it must be a whole number above 0."
        )
    return value


def _number(file: GgufFile, key: str, default: float | None = None) -> float:
    value = _uniform(file, key, default)
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise ModelError(
            f"{file.path}: '{file.architecture}.{key}' is {value!r:.60}; it must be a number of 0 or more."
        )
    return float(value)


def _uniform(file: GgufFile, key: str, default: Any) -> Any:
    """A list has one entry per layer; all must be equal, since mlx-lm's models have one value for all layers."""
    value = file.hyper(key, default)
    if value is None:
        raise ModelError(f"{file.path}: the metadata have no '{file.architecture}.{key}', which is required.")
    if not isinstance(value, list):
        return value
    if not value or any(each != value[0] for each in value):
        raise ModelError(f"{file.path}: '{file.architecture}.{key}' differs between layers, which is not supported.")
    return value[0]
