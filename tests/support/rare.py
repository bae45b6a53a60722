"""More tiny families, each with another way of telling what its layers keep. For tests that need no server."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

from support.tiny import FAMILIES, VOCAB, write_model

_BASE = {name: value for name, value in FAMILIES["llama"].items() if name not in ("head_dim", "rope_scaling")}
_LATENT = {
    **_BASE,
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256, "mscale": 1.0},
}
_MAMBA = {"mamba_d_conv": 4, "mamba_d_state": 16, "mamba_proj_bias": False, "mamba_conv_bias": True}
RARE: dict[str, dict[str, Any]] = {
    "phi3": _BASE,
    "gpt2": {
        "n_ctx": 512,
        "n_embd": 64,
        "n_head": 4,
        "n_layer": 2,
        "n_positions": 512,
        "layer_norm_epsilon": 1e-5,
        "vocab_size": VOCAB,
    },
    # Only what the hub's file has: heads are left to the family's defaults.
    "gemma3": {
        "vocab_size": VOCAB,
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 64,
            "num_hidden_layers": 7,
            "intermediate_size": 96,
            "vocab_size": VOCAB,
        },
    },
    "gemma4_text": {
        **_BASE,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 1,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 0,
    },
    "gpt_oss": {
        **_BASE,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "deepseek_v3": _LATENT,
    "deepseek_v2": {**_LATENT, "topk_method": "greedy"},
    "jamba": {
        **_BASE,
        **_MAMBA,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_expand": 2,
        "mamba_dt_rank": 8,
        "num_experts": 2,
        "num_experts_per_tok": 1,
    },
    "nemotron_h": {
        **_BASE,
        "hybrid_override_pattern": "M-*-",
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "n_groups": 1,
        "mlp_bias": False,
        "use_bias": False,
        "use_conv_bias": True,
        "layer_norm_epsilon": 1e-5,
        "attention_bias": False,
        "mlp_hidden_act": "relu2",
    },
    "qwen3_next": {
        **_BASE,
        "head_dim": 16,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "partial_rotary_factor": 0.5,
        "full_attention_interval": 2,
    },
}


def write_rare(folder: Path, family: str, **changes: Any) -> Path:
    with mock.patch.dict(FAMILIES, RARE):
        return write_model(folder, family, **changes)
