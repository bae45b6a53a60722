"""Families whose blocks are fused, as tiny models: settings beside those of `tiny`, and what of them is fused."""

from __future__ import annotations

import importlib
from typing import Any

from support.tiny import BASE, FAMILIES

_EXPERTS = {
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "attention_bias": False,
}
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 32,
    "moe_intermediate_size": 32,
    "mlp_only_layers": [0],
    "full_attention_interval": 2,
    "partial_rotary_factor": 0.5,
    "norm_topk_prob": True,
    "attention_bias": False,
}

SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "phi3": {},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {},
    "granite": {
        "logits_scaling": 1.0,
        "attention_multiplier": 0.25,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 0.22,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "glm4": {"attention_bias": False, "partial_rotary_factor": 0.5},
    "smollm3": {},
    "starcoder2": {"norm_epsilon": 1e-5},
    "nemotron": {"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 1.0, "mlp_bias": False},
    "qwen3_moe": {},
    "glm4_moe": {**_EXPERTS, "use_qk_norm": True, "partial_rotary_factor": 0.5, "rope_scaling": None},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
    },
    "lfm2": {},
    "mamba2": {},
    "qwen3_next": _DELTA,
    "deepseek_v3": {
        **_EXPERTS,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "moe_layer_freq": 1,
    },
}
WHOLE = {"attention and MLP": 4}
FORMS: dict[str, dict[str, int]] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "gemma3_text", "granite"), WHOLE),
    **dict.fromkeys(("glm4", "smollm3"), WHOLE),
    "starcoder2": {"attention and the projections of mlp": 4},
    "nemotron": {"attention and the projections of mlp": 4},
    "qwen3_moe": {"attention and experts": 4},
    "glm4_moe": {"attention and MLP": 1, "attention and experts": 3},
    "gpt_oss": {"attention and experts": 4},
    "lfm2": {"convolution and MLP": 2, "attention and MLP": 2},
    "mamba2": {"the projections of mixer": 2},
    "qwen3_next": {
        "the projections of linear_attn and MLP": 1,
        "attention and experts": 2,
        "the projections of linear_attn and experts": 1,
    },
    "deepseek_v3": {"the projections of self_attn and MLP": 1, "the projections of self_attn and experts": 3},
}
"""What is fused of the four layers of each."""


def settings(family: str) -> dict[str, Any]:
    return {"model_type": family, **FAMILIES.get(family, BASE), **SETTINGS.get(family, {})}


def make(config: dict[str, Any]) -> Any:
    """A model in memory: the same numbers whenever it is called with the same settings; biases and norms are not as
    they begin."""
    import mlx.core as mx
    from mlx.utils import tree_map

    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    mx.random.seed(4)
    model.update(tree_map(lambda value: mx.random.normal(value.shape) * 0.2 + (value.ndim == 1), model.parameters()))
    mx.eval(model.parameters())
    return model
