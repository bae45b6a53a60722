"""Maps GGUF tensor names to mlx-lm parameter names."""

from __future__ import annotations

_MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}

_BY_ARCHITECTURE: dict[str, dict[str, str]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": _QK_NORMS,
    "qwen3moe": {
        **_QK_NORMS,
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_exps": "mlp.switch_mlp.gate_proj",
        "ffn_up_exps": "mlp.switch_mlp.up_proj",
        "ffn_down_exps": "mlp.switch_mlp.down_proj",
    },
    # Gemma also normalises after attention and after the MLP, so `ffn_norm` is a different norm here.
    "gemma3": {
        **_QK_NORMS,
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    # Phi fuses query, key and value into one matrix, and gate and up into another, which GGUF calls `ffn_up`.
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
}

ARCHITECTURES = tuple(_BY_ARCHITECTURE)
"""The supported architectures, by their GGUF names."""

ROPE_TENSORS = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
"""Tensors that are not parameters: they configure RoPE."""


def parameter_name(architecture: str, tensor: str) -> str | None:
    """The parameter's name. Returns None if the architecture has no such parameter."""
    stem, _, leaf = tensor.rpartition(".")
    if leaf not in ("weight", "bias"):
        return None
    if not stem.startswith("blk."):
        return f"{_MODEL[stem]}.{leaf}" if stem in _MODEL else None
    number, _, part = stem.removeprefix("blk.").partition(".")
    module = (_LAYER | _BY_ARCHITECTURE[architecture]).get(part)
    return f"model.layers.{number}.{module}.{leaf}" if module else None
