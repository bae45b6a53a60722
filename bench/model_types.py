"""A configuration and a model with random weights for every text model type that the installed mlx-lm has.

Configurations of families differ less than their number suggests: most are made of the same fields. `fields` gives all
of them at once for a size, and each family takes those that it knows. `OWN` adds what only one family has, or reads
otherwise than the rest. A field that is new and needed is guessed from its type, so a family that is new in mlx-lm
needs no line here, or is named with the reason why it cannot be made.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import json
import pkgutil
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Config = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Size:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocab: int
    experts: int = 4
    chosen: int = 2
    expert_size: int = 32
    window: int = 24
    context: int = 512
    rank: int = 32
    """Of latent attention and of other low-rank projections."""
    rotary: int = 8
    """Of latent attention: how much of a head is rotated."""
    state: int = 16
    dtype: str = "float32"

    @property
    def types(self) -> list[str]:
        """Of layers: windows and full attention in turn."""
        return ["sliding_attention", "full_attention"] * (self.layers // 2)


TINY = Size(64, 4, 4, 2, 16, 96, 97)
SMALL = Size(256, 4, 4, 2, 64, 512, 4096, 8, 2, 256, 256, 8192, 128, 32, 64)
LARGE = Size(2048, 16, 32, 8, 64, 8192, 128256, 32, 4, 768, 512, 131072, 512, 64, 128, "bfloat16")
SIZES = {"tiny": TINY, "small": SMALL, "large": LARGE}
MOST_PARAMETERS = {"tiny": 1e7, "small": 4e8, "large": 8e9}
"""A family whose own defaults make it larger than this was not told its size."""


class NotMade(Exception):
    """Why there is no model of a type."""


def model_types() -> Iterator[str]:
    """Every module of mlx-lm that defines a model, also one that cannot be imported here."""
    (package,) = importlib.util.find_spec("mlx_lm").submodule_search_locations  # type: ignore[union-attr,misc]
    for module in pkgutil.iter_modules([f"{package}/models"]):
        source = Path(package, "models", f"{module.name}.py").read_text()
        if "\nclass ModelArgs" in source and "\nclass Model(" in source:
            yield module.name


def configuration(model_type: str, size: Size) -> Config:
    """As a `config.json` would have it."""
    config = {**fields(size), **OWN.get(model_type, _nothing)(size), "model_type": model_type}
    if model_type in TEXT_TYPES:
        text_type = TEXT_TYPES[model_type]
        config["text_config"] = {**fields(size), **OWN.get(text_type, _nothing)(size), "model_type": text_type}
        config["text_config"].update(OWN.get(model_type, _nothing)(size).get("text_config", {}))
    arguments = _module(model_type).ModelArgs
    hints = typing.get_type_hints(arguments)
    for name in _needed(arguments):
        if name not in config:
            config[name] = _guess(hints.get(name))
    return config


def build(model_type: str, config: Config, most_parameters: float) -> Any:
    """The model, with weights that are not computed yet. Raises `NotMade` with the reason."""
    from mlx.utils import tree_flatten

    module = _module(model_type)
    try:
        model = module.Model(module.ModelArgs.from_dict(config))
    except Exception as error:
        raise NotMade(f"{type(error).__name__}: {error}") from error
    count = sum(weight.size for _, weight in tree_flatten(model.parameters()))
    if count > most_parameters:
        raise NotMade(f"{count / 1e6:,.0f} million parameters: a field that says how large it is has another name")
    return model


def random_weights(model: Any, dtype: str, seed: int = 0) -> dict[str, Any]:
    """Large enough that logits differ clearly between tokens."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    mx.random.seed(seed)
    kind = getattr(mx, dtype)
    return {
        name: (_matrix(value, kind) if value.ndim > 1 else value.astype(kind))
        if mx.issubdtype(value.dtype, mx.floating)
        else value
        for name, value in tree_flatten(model.parameters())
    }


def write_model(folder: Path, model_type: str, size_name: str = "tiny") -> Path:
    """A folder that mlx-lm loads. Raises `NotMade`."""
    import mlx.core as mx

    size = SIZES[size_name]
    config = {**configuration(model_type, size), "torch_dtype": size.dtype}
    weights = random_weights(build(model_type, config, MOST_PARAMETERS[size_name]), size.dtype)
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _matrix(value: Any, kind: Any) -> Any:
    import mlx.core as mx

    # The scale of a tiny model's weights; a wide layer adds up more of them.
    return (mx.random.normal(value.shape) * min(0.1, 0.8 / value.shape[-1] ** 0.5)).astype(kind)


def _module(model_type: str) -> Any:
    try:
        return importlib.import_module(f"mlx_lm.models.{model_type}")
    except (ImportError, SystemExit) as error:  # one of them asks for a package and exits
        raise NotMade(f"it needs a package that is not installed ({error})") from error


def _needed(arguments: Any) -> list[str]:
    if not dataclasses.is_dataclass(arguments):
        return []
    parameters = inspect.signature(arguments).parameters.values()
    return [parameter.name for parameter in parameters if parameter.default is parameter.empty]


def _guess(kind: Any) -> Any:
    """A value for a field that is needed and unknown."""
    plain = {bool: False, int: 1, float: 1.0, str: "", list: [], dict: {}}
    return plain.get(typing.get_origin(kind) or kind)


def _nothing(size: Size) -> Config:
    return {}


def fields(size: Size) -> Config:
    """What most families are told, under all the names that they have for it."""
    positions = {"rope_theta": 10000.0, "rope_type": "default", "type": "default", "partial_rotary_factor": 0.5}
    config: Config = {
        **_named(size.hidden, "hidden_size hidden_dim d_model n_embd model_dim block_dim dim_model_base"),
        **_named(size.layers, "num_hidden_layers num_layers n_layers n_layer num_transformer_layers"),
        **_named(size.heads, "num_attention_heads num_heads n_heads n_head swa_num_attention_heads"),
        **_named(size.kv_heads, "num_key_value_heads num_kv_heads n_kv_heads num_attention_groups n_shared_head"),
        **_named(size.kv_heads, "swa_num_key_value_heads"),
        **_named(size.head_dim, "head_dim swa_head_dim swa_v_head_dim v_head_dim kv_channels qk_nope_head_dim"),
        **_named(size.feed_forward, "intermediate_size n_inner block_ff_dim ffn_hidden_size ff_intermediate_size"),
        **_named(size.feed_forward, "intermediate_size_mlp shared_intermediate_size dense_intermediate_size"),
        **_named(size.vocab, "vocab_size num_vocab vocab_size_per_layer_input"),
        **_named(size.context, "max_position_embeddings n_ctx n_positions block_size model_max_length"),
        **_named(size.window, "sliding_window sliding_window_size attention_window_size"),
        **_named(1e-5, "rms_norm_eps layer_norm_eps norm_eps layer_norm_epsilon layernorm_epsilon post_norm_eps"),
        **_named(1.0, "logits_scaling embedding_multiplier residual_multiplier routed_scaling_factor"),
        **_named(1.0, "scale_emb output_multiplier attention_multiplier rotary_pct lm_head_multiplier"),
        **_named(False, "tie_word_embeddings attention_bias mlp_bias use_bias qkv_bias use_qkv_bias"),
        **_named(10000.0, "rope_theta rotary_emb_base rope_local_base_freq swa_rope_theta"),
        "hidden_act": "silu",
        "partial_rotary_factor": 0.5,
        "rotary_dim": size.head_dim // 2,
        "rope_parameters": positions,
        "sliding_window_pattern": 2,
        "layer_types": size.types,
        # Experts
        **_named(size.experts, "num_experts num_local_experts n_routed_experts moe_num_experts"),
        **_named(size.chosen, "num_experts_per_tok num_experts_per_token moe_k moe_topk moe_top_k"),
        **_named(1, "n_shared_experts num_shared_experts num_shared_expert moe_num_shared_experts"),
        **_named(size.expert_size, "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size"),
        **_named(size.expert_size, "moe_shared_expert_intermediate_size share_expert_dim moe_hidden_size"),
        **_named(1, "decoder_sparse_step first_k_dense_replace n_group topk_group moe_layer_freq num_dense_layers"),
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        # Latent attention
        **_named(size.rank, "kv_lora_rank q_lora_rank"),
        "qk_rope_head_dim": size.rotary,
        "index_head_dim": size.head_dim,
        "index_n_heads": 2,
        "index_topk": size.window,
        # State spaces, delta nets, convolutions
        **_named(4, "conv_kernel mamba_d_conv linear_conv_kernel_dim conv1d_width conv_window"),
        **_named(size.heads, "mamba_num_heads mamba_n_heads linear_num_value_heads"),
        **_named(size.head_dim, "mamba_head_dim mamba_d_head linear_key_head_dim linear_value_head_dim"),
        **_named(size.state, "state_size ssm_state_size mamba_d_state"),
        **_named(size.rank, "a_low_rank_dim v_low_rank_dim gate_low_rank_dim decay_low_rank_dim mamba_dt_rank"),
        **_named(1, "n_groups mamba_n_groups group_norm_size"),
        "mamba_d_ssm": size.heads * size.head_dim,
        "mamba_chunk_size": 16,
        "mamba_expand": 2,
        **_named(True, "use_conv_bias mamba_conv_bias"),
        **_named(False, "mamba_proj_bias conv_bias linear_allow_neg_eigval block_auto_adjust_ff_dim"),
        "linear_num_key_heads": size.heads // 2,
        "full_attention_interval": 2,
        "layer_group_size": 2,
        "time_step_rank": 4,
        "time_step_limit": [0.001, 0.1],
        "conv_L_cache": 3,
        "full_attn_idxs": list(range(1, size.layers, 2)),
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
    }
    return config


def _named(value: Any, names: str) -> Config:
    return dict.fromkeys(names.split(), value)


def _yarn(size: Size) -> Config:
    return {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": size.context // 2,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "llama_4_scaling_beta": 0.1,
        "rope_theta": 10000.0,
    }


def _by_layer_type(size: Size) -> Config:
    """Rotary settings for each kind of layer."""
    one = {"rope_theta": 10000.0, "rope_type": "default"}
    return {"rope_parameters": {"sliding_attention": one, "full_attention": one}}


def _delta_layers(size: Size) -> Config:
    """Layers counted from one: delta nets, and full attention in each second one."""
    return {
        "linear_attn_config": {
            "num_heads": size.heads,
            "head_dim": size.head_dim,
            "short_conv_kernel_size": 4,
            "kda_layers": list(range(1, size.layers + 1, 2)),
            "full_attn_layers": list(range(2, size.layers + 1, 2)),
            "gate_lower_bound": -5.0,
        }
    }


def _blocks(size: Size) -> Config:
    block = {"attention": {"n_heads_in_group": size.heads // size.kv_heads}, "ffn": {"ffn_mult": 1.5}}
    return {"block_configs": [block] * size.layers}


def _mamba_layers(size: Size) -> Config:
    return {"layer_types": ["mamba", "attention"] * (size.layers // 2)}


def _convolution_layers(size: Size) -> Config:
    return {"layer_types": ["conv", "full_attention"] * (size.layers // 2)}


OWN: dict[str, Callable[[Size], Config]] = {
    "baichuan_m1": lambda size: {"sliding_window_layers": list(range(0, size.layers, 2)), "conv_window": 2},
    "dbrx": lambda size: {
        "ffn_config": {
            "ffn_hidden_size": size.expert_size,
            "moe_num_experts": size.experts,
            "moe_top_k": size.chosen,
            "moe_jitter_eps": 0,
        },
        "attn_config": {"kv_n_heads": size.kv_heads, "clip_qkv": 8, "rope_theta": 10000.0},
    },
    "deepseek_v2": lambda size: {"rope_scaling": _yarn(size), "topk_method": "greedy", "scoring_func": "softmax"},
    "exaone4": lambda size: {"rope_scaling": None, "sliding_window_pattern": "LG"},
    "exaone_moe": lambda size: {"is_moe_layer": [False] + [True] * (size.layers - 1)},
    "gemma3n_text": lambda size: {
        "num_kv_shared_layers": size.layers // 2,
        "final_logit_softcapping": 30.0,
        "activation_sparsity_pattern": [0.0] * size.layers,
        "hidden_size_per_layer_input": 16,
        "altup_num_inputs": 2,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_active_idx": 0,
        "laurel_rank": 8,
        "tie_word_embeddings": True,
    },
    "gemma4_text": lambda size: {
        "global_head_dim": 2 * size.head_dim,
        "num_kv_shared_layers": size.layers // 2 - 1,
        "hidden_size_per_layer_input": 16,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            "full_attention": {"rope_theta": 1e6, "rope_type": "proportional", "partial_rotary_factor": 0.5},
        },
    },
    "glm_moe_dsa": lambda size: {"rope_parameters": {"rope_theta": 10000.0}},
    "gear": lambda size: {
        "layer_types": ["conv_mixer", "sliding_attention", "conv_mixer", "full_attention"] * (size.layers // 4)
    },
    "granitemoehybrid": _mamba_layers,
    "hunyuan": lambda size: {
        **_named(True, "use_mixed_mlp_moe use_qk_norm use_cla"),
        "cla_share_factor": 2,
        "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0},
    },
    "jamba": lambda size: {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
    },
    "kimi_linear": _delta_layers,
    "kimi_k3_text": lambda size: {**_delta_layers(size), "hidden_act": "situ", "activation_situ_beta": 1.0},
    "lfm2": _convolution_layers,
    "lfm2_moe": lambda size: {**_convolution_layers(size), "use_expert_bias": True},
    "llama4_text": lambda size: {
        "attention_chunk_size": size.window,
        "interleave_moe_layer_step": 2,
        "rope_scaling": None,
        "use_qk_norm": True,
        "num_experts_per_tok": 1,
        "no_rope_layers": [1] * size.layers,
    },
    "longcat_flash": lambda size: {
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "zero_expert_num": 1,
        **_named(True, "mla_scale_q_lora mla_scale_kv_lora"),
    },
    "longcat_flash_ngram": lambda size: {
        "zero_expert_num": 1,
        **_named(True, "mla_scale_q_lora mla_scale_kv_lora"),
    },
    "mamba2": lambda size: {"num_heads": 2 * size.heads, "intermediate_size": 2 * size.heads * size.head_dim},
    "mellum": _by_layer_type,
    "mimo_v2_flash": lambda size: {
        "hybrid_layer_pattern": [1, 0] * (size.layers // 2),
        "moe_layer_freq": [0] + [1] * (size.layers - 1),
        **_named(False, "add_swa_attention_sink_bias add_full_attention_sink_bias"),
    },
    "minicpm": lambda size: {"scale_depth": 1.4},
    "minicpm3": lambda size: {
        "scale_depth": 1.4,
        "rope_scaling": {
            "original_max_position_embeddings": size.context,
            **_named([1.0] * (size.rotary // 2), "short_factor long_factor"),
        },
    },
    "minimax_m3_text": lambda size: {"moe_layer_freq": [0] + [1] * (size.layers - 1), "layer_types": None},
    "ministral3": lambda size: {"rope_parameters": _yarn(size)},
    "mistral4": lambda size: {"rope_parameters": _yarn(size), "rope_scaling": _yarn(size)},
    "muse_spark_text": lambda size: {
        "layer_rope_theta": [10000.0] * size.layers,
        "final_logit_softcapping": 30.0,
        "num_shared_experts": 0,
    },
    "nemotron-nas": _blocks,
    "nemotron_h": lambda size: {
        "hybrid_override_pattern": "M*M-" * (size.layers // 4),
        "mlp_hidden_act": "relu2",
        "n_shared_experts": None,
    },
    "olmo_hybrid": lambda size: {"layer_types": ["linear_attention", "full_attention"] * (size.layers // 2)},
    "openelm": lambda size: {
        "ffn_dim_divisor": 8,
        "num_query_heads": [size.heads] * size.layers,
        "num_kv_heads": [size.kv_heads] * size.layers,
        "ffn_multipliers": [1.5] * size.layers,
    },
    "phi3small": lambda size: {
        "dense_attention_every_n_layers": 2,
        "gegelu_limit": 20.0,
        "vocab_size": max(size.vocab, 100352),  # it writes to the logits of tokens by their number
    },
    "qwen": lambda size: {"intermediate_size": 2 * size.feed_forward},
    "recurrent_gemma": lambda size: {"logits_soft_cap": 30.0, "block_types": ["recurrent", "attention"]},
    "spark2_5": lambda size: {**_by_layer_type(size), "hidden_act": "gelu"},
}

TEXT_TYPES = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "kimi_k25": "deepseek_v3",
    "kimi_k3": "kimi_k3_text",
    "kimi_vl": "deepseek_v3",
    "lfm2-vl": "lfm2",
    "llama4": "llama4_text",
    "minimax_m3_vl": "minimax_m3_text",
    "mistral3": "ministral3",
    "muse_spark": "muse_spark_text",
    "pixtral": "llama",
    "prism_hadamard_qwen35": "qwen3_5_text",
    "qwen2_vl": "qwen2",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
}
"""The language model within models that also see. The configuration has it in a part of its own."""


def main() -> int:
    """model_types.py TYPE SIZE FOLDER: make a model that servers load, with a tokenizer."""
    from models import write_tokenizer

    model_type, size_name, folder = sys.argv[1:]
    try:
        write_model(Path(folder), model_type, size_name)
    except NotMade as error:
        sys.exit(str(error))
    write_tokenizer(Path(folder), SIZES[size_name].vocab)
    return 0


if __name__ == "__main__":
    sys.exit(main())
