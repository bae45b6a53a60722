"""KV cache size and context length from configurations alone. `test_estimate` compares them with real models."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.models.geometry import context_length, kv_group_size, kv_values_per_token

HEADS = {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 64}


@pytest.mark.parametrize(
    ("config", "values"),
    [
        (HEADS, 4 * 2 * 64),
        ({**HEADS, "num_key_value_heads": 2}, 4 * 2 * 16),
        ({**HEADS, "num_key_value_heads": [1, 2, 3, 4]}, 2 * 8 * 10),
        ({**HEADS, "head_dim": 32, "v_head_dim": 16}, 4 * 8 * 48),
        ({"text_config": HEADS, "hidden_size": 9999}, 4 * 2 * 64),
        ({**HEADS, "layer_types": ["linear_attention", "sliding_attention"]}, 2 * 2 * 64),
        ({**HEADS, "layers_block_type": ["mamba", "mamba", "attention", "mlp"]}, 2 * 64),
        ({**HEADS, "full_attention_interval": 4}, 2 * 64),
        ({**HEADS, "layer_group_size": 3}, 2 * 2 * 64),
        ({**HEADS, "linear_attn_config": {"kda_layers": [1, 2, 3]}}, 2 * 64),
        ({**HEADS, "kv_lora_rank": 24, "qk_rope_head_dim": 8}, 4 * 32),
        ({**HEADS, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "index_head_dim": 5}, 4 * 42),
        ({**HEADS, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "model_type": "longcat_flash"}, 4 * 64),
        ({"model_type": "mamba"}, 0),
    ],
)
def test_kv_values_per_token(config: dict[str, Any], values: int) -> None:
    assert kv_values_per_token(config, {}) == values


@pytest.mark.parametrize(
    ("config", "group"),
    [
        ({"head_dim": 128}, 64),
        ({"head_dim": 96}, 32),
        ({"head_dim": 128, "v_head_dim": 96}, 32),
        ({"hidden_size": 576, "num_attention_heads": 9}, 64),
        ({"text_config": {"hidden_size": 64, "num_attention_heads": 2}}, 32),
        ({}, 32),
    ],
)
def test_kv_group_size(config: dict[str, Any], group: int) -> None:
    assert kv_group_size(config) == group


def test_the_context_length_may_be_unknown() -> None:
    assert context_length({"max_position_embeddings": None, "text_config": {"n_positions": 5}}) == 5
    assert context_length({"max_position_embeddings": 0}) is None


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, "has no num_hidden_layers"),
        ({**HEADS, "num_hidden_layers": "four"}, "num_hidden_layers is 'four'"),
        ({**HEADS, "num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": 4, "hidden_size": 8}, "has no num_attention_heads"),
        ({"num_hidden_layers": 4, "num_attention_heads": 8}, "has no hidden_size"),
    ],
)
def test_a_config_without_the_needed_settings(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        kv_values_per_token(config, {})


def test_widths_from_weights_take_precedence_but_only_for_layers_with_a_kv_cache() -> None:
    widths = {0: 10, 1: 20, 3: 40, 4: 1000}
    assert kv_values_per_token({"num_hidden_layers": 4}, widths) == 70
    assert kv_values_per_token({"num_hidden_layers": 4, "full_attn_idxs": [1, 3]}, widths) == 60
