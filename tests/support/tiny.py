"""Tiny random float32 models of many families, written as model folders: real files, real loading code."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from millstream.models.source import ModelSource

VOCAB = 97

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**BASE, "rope_theta": 500000.0, "rope_scaling": _LLAMA3},
    "gemma3_text": {
        **BASE,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    "qwen3_moe": {
        **BASE,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    # Convolutions and attention: ArraysCache beside KVCache.
    "lfm2": {
        **BASE,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 96,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1, 3],
    },
    # Purely recurrent: ArraysCache only.
    "mamba2": {
        "num_heads": 4,
        "head_dim": 32,
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "state_size": 16,
        "ssm_state_size": 16,
        "num_hidden_layers": 2,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": False,
        "time_step_limit": [0.001, 0.1],
        "time_step_rank": 4,
        "max_position_embeddings": 512,
    },
    # A state space model and attention in every layer: CacheList.
    "falcon_h1": {
        **BASE,
        "mamba_chunk_size": 16,
        "mamba_d_head": 16,
        "mamba_d_ssm": 64,
        "mamba_d_state": 16,
        "mamba_n_heads": 4,
        "mamba_rms_norm": True,
        "lm_head_multiplier": 1.0,
    },
    # Chunked attention: ChunkedKVCache, which cannot batch.
    "llama4": {
        "vocab_size": VOCAB,
        "text_config": {
            **BASE,
            "model_type": "llama4_text",
            "attention_bias": False,
            "attention_chunk_size": 16,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 96,
            "num_experts_per_tok": 1,
            "num_local_experts": 2,
            "rope_scaling": None,
            "use_qk_norm": True,
        },
    },
}

BATCHABLE = [family for family in FAMILIES if family != "llama4"]


def write_model(folder: Path, family: str, *, seed: int = 0, **changes: Any) -> Path:
    """Make a model of `family`, one of those above or another, in `folder`. Weights are large enough that logits differ
    clearly between tokens."""
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_map

    config = {"model_type": family, **FAMILIES.get(family, BASE), **changes}
    module = importlib.import_module(f"mlx_lm.models.{family}")
    model = module.Model(module.ModelArgs.from_dict(config))
    mx.random.seed(seed)
    weights = tree_map(
        lambda value: mx.random.normal(value.shape) * 0.1 if value.ndim > 1 else value, model.parameters()
    )
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(weights)))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path) -> None:
    """One token a byte and three special ones: every text has tokens, and random ones are often no text."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def byte_source(folder: Path) -> ModelSource:
    """Where the byte tokenizer lies, without a model."""
    write_tokenizer(folder)
    return ModelSource(folder.name, "folder", folder)


def write_servable(folder: Path, **changes: Any) -> Path:
    """A tiny llama that the whole server can serve: weights and a tokenizer that fit each other."""
    write_model(folder, "llama", vocab_size=259, **changes)
    write_tokenizer(folder)
    return folder
