"""The mlx-lm configuration made from a GGUF file's metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millstream.errors import ModelError
from millstream.models.gguf_config import eos_token_ids, gguf_config
from millstream.models.gguf_file import GgufFile, GgufTensor
from millstream.models.gguf_names import ARCHITECTURES, parameter_name

BASE = {
    "block_count": 2,
    "context_length": 4096,
    "embedding_length": 64,
    "feed_forward_length": 128,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}


def file(
    architecture: str, values: dict[str, Any] | None = None, tensors: dict[str, tuple[int, ...]] | None = None
) -> GgufFile:
    metadata = {f"{architecture}.{key}": value for key, value in (BASE | (values or {})).items()}
    shapes = {"token_embd.weight": (96, 64)} | (tensors or {})
    made = {name: GgufTensor(name, "F32", shape, np.ones(shape, np.float32)) for name, shape in shapes.items()}
    return GgufFile(Path("some.gguf"), {"general.architecture": architecture} | metadata, made)


def test_llama_has_traditional_rope_and_tied_embeddings() -> None:
    config = gguf_config(file("llama", {"rope.dimension_count": 16, "rope.freq_base": 5e5}))
    assert config == {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "vocab_size": 96,
        "max_position_embeddings": 4096,
        "rope_theta": 5e5,
        "rope_scaling": None,
        "rope_traditional": True,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "eos_token_id": [],
    }


def test_an_output_tensor_unties_the_embeddings() -> None:
    assert not gguf_config(file("qwen2", tensors={"output.weight": (96, 64)}))["tie_word_embeddings"]


def test_an_explicit_head_size() -> None:
    assert gguf_config(file("qwen3", {"attention.key_length": 32}))["head_dim"] == 32


@pytest.mark.parametrize(
    ("values", "scaling"),
    [
        ({"rope.scaling.type": "none"}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}, {"type": "linear", "factor": 8.0}),
        ({"rope.scale_linear": 4.0}, {"type": "linear", "factor": 4.0}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 1024},
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
        ),
    ],
)
def test_rope_scaling(values: dict[str, Any], scaling: dict[str, Any] | None) -> None:
    assert gguf_config(file("qwen2", values))["rope_scaling"] == scaling


def test_gemma_has_sliding_windows_and_two_rope_bases() -> None:
    values = {"attention.sliding_window": 512, "attention.key_length": 256, "rope.freq_base": 1e6}
    config = gguf_config(file("gemma3", values))
    assert config["model_type"] == "gemma3_text"
    assert (config["sliding_window"], config["sliding_window_pattern"]) == (512, 6)
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1e6, 10000.0)
    assert config["query_pre_attn_scalar"] == 256


def test_gemma_27b_scales_queries_by_the_width() -> None:
    config = gguf_config(file("gemma3", {"block_count": 62, "attention.key_length": 128}))
    assert config["query_pre_attn_scalar"] == 16


def test_a_list_of_sliding_windows_gives_their_period() -> None:
    values = {"attention.sliding_window": 8, "attention.sliding_window_pattern": [True, True, False, True, True, False]}
    assert gguf_config(file("gemma3", values))["sliding_window_pattern"] == 3


def test_phi_has_longrope_factors() -> None:
    tensors: dict[str, tuple[int, ...]] = {"rope_factors_long.weight": (6,), "rope_factors_short.weight": (6,)}
    values = {"rope.dimension_count": 12, "rope.scaling.original_context_length": 2048}
    config = gguf_config(file("phi3", values, tensors))
    assert config["partial_rotary_factor"] == 0.75
    assert config["original_max_position_embeddings"] == 2048
    assert config["rope_scaling"]["long_factor"] == [1.0] * 6


def test_qwen3_experts() -> None:
    values = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32}
    config = gguf_config(file("qwen3moe", values))
    assert (config["num_experts"], config["num_experts_per_tok"], config["moe_intermediate_size"]) == (8, 2, 32)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (file("mamba"), "'mamba' is not supported.*llama, qwen2, qwen3"),
        (file("llama", {"expert_count": 8}), "mixture-of-experts"),
        (file("llama", {"rope.dimension_count": 8}), "RoPE rotates 8 of 16"),
        (file("llama", {"attention.head_count_kv": [2, 4]}), "differs between layers"),
        (file("llama", {"block_count": None}), r"no 'llama\.block_count'"),
        (file("qwen2", {"rope.scaling.type": "odd", "rope.scaling.factor": 2.0}), "scaling 'odd'"),
        (GgufFile(Path("some.gguf"), dict(file("llama").metadata), {}), "token_embd"),
    ],
)
def test_unsupported_files_are_refused_with_a_reason(made: GgufFile, words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        gguf_config(made)
    assert "some.gguf" in caught.value.message


def test_declared_and_common_end_of_turn_tokens() -> None:
    metadata = {
        "tokenizer.ggml.tokens": ["a", "<|im_end|>", "<|endoftext|>", "</s>", "<|end|>"],
        "tokenizer.ggml.token_type": [1, 3, 3, 3, 1],
        "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.ggml.eot_token_id": 1,
    }
    assert eos_token_ids(metadata) == {1, 2, 3}
    assert eos_token_ids({}) == frozenset()


def test_tensor_names() -> None:
    assert set(ARCHITECTURES) == {"llama", "qwen2", "qwen3", "qwen3moe", "gemma3", "phi3"}
    assert parameter_name("llama", "blk.11.ffn_norm.weight") == "model.layers.11.post_attention_layernorm.weight"
    assert parameter_name("gemma3", "blk.11.ffn_norm.weight") == "model.layers.11.pre_feedforward_layernorm.weight"
    assert parameter_name("qwen2", "blk.0.attn_q.bias") == "model.layers.0.self_attn.q_proj.bias"
    assert parameter_name("llama", "blk.0.attn_q_norm.weight") is None
    assert parameter_name("llama", "v.patch_embd.weight") is None
    assert parameter_name("llama", "blk.0.attn_q.scale") is None
