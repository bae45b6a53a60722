"""Writes a tiny Llama as one servable GGUF file, with a byte-level vocabulary."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from tokenizers import pre_tokenizers

from support.tiny import CHAT_TEMPLATE

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
HIDDEN, LAYERS, HEADS, INNER = 64, 2, 4, 96
NORMAL, CONTROL = 1, 3


def write_gguf(path: Path, sampling: dict[str, float] | None = None) -> Path:
    """`sampling`: what its metadata recommend."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet()) + SPECIAL_TOKENS
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if token in SPECIAL_TOKENS else NORMAL for token in tokens])
    writer.add_token_merges(["a b", "t h"])
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, number in (sampling or {}).items():
        add = writer.add_int32 if isinstance(number, int) else writer.add_float32
        add(f"general.sampling.{name}", number)
    random = np.random.default_rng(0)
    for name, shape in _shapes(len(tokens)).items():
        values = random.normal(size=shape) * 0.1 if len(shape) > 1 else np.ones(shape)
        writer.add_tensor(name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _shapes(vocabulary: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocabulary, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for block in range(LAYERS):
        shapes |= {f"blk.{block}.{name}.weight": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
        shapes |= {f"blk.{block}.attn_{name}.weight": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "output")}
        shapes |= {f"blk.{block}.ffn_{name}.weight": (INNER, HIDDEN) for name in ("gate", "up")}
        shapes[f"blk.{block}.ffn_down.weight"] = (HIDDEN, INNER)
    return shapes
