"""Which parameter of the mlx-lm model a tensor of a GGUF file is."""

from __future__ import annotations

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

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

_OWN: dict[str, dict[str, str]] = {
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
    # Gemma normalises after attention and after the MLP too, so `ffn_norm` is another norm than elsewhere.
    "gemma3": {
        **_QK_NORMS,
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    # Phi keeps query, key and value in one matrix, and gate and up in another that GGUF calls `ffn_up`.
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
}

SERVED = tuple(_OWN)
"""The architectures that are served, by their GGUF names."""

ROPE_TENSORS = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
"""Tensors that are no parameters: the configuration and the rotary embedding are made from them."""


def parameter_name(architecture: str, tensor: str) -> str | None:
    """The parameter's name, or None where the architecture has no such parameter."""
    stem, _, leaf = tensor.rpartition(".")
    if leaf not in ("weight", "bias"):
        return None
    if not stem.startswith("blk."):
        return f"{_TOP[stem]}.{leaf}" if stem in _TOP else None
    number, _, part = stem.removeprefix("blk.").partition(".")
    module = (_LAYER | _OWN[architecture]).get(part)
    return f"model.layers.{number}.{module}.{leaf}" if module else None
