"""Embedding models with random weights of a real shape, which are as fast as trained ones. One token per word."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from millstream.bench.words import WORDS

_BERT: dict[str, Any] = {
    "model_type": "bert",
    "vocab_size": 30522,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
}
_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151669,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
SHAPES: dict[str, dict[str, Any]] = {
    "minilm": {
        **_BERT,
        "hidden_size": 384,
        "intermediate_size": 1536,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
    },
    "bert-base": {
        **_BERT,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
    },
    "bert-tiny": {
        **_BERT,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "qwen3-0.6b": _QWEN3,
    "qwen3-tiny": {
        **_QWEN3,
        "vocab_size": 2048,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
}
VERSION = 1
"""Part of the folders' names. Raise it when what is made here changes: models are reused."""


def make_encoder(shape: str, dtype_name: str | None = None) -> Path:
    """The folder of the model, made at first use and reused afterwards. As they are published, BERTs are in float32 and
    Qwen3 in bfloat16."""
    import mlx.core as mx

    suffix = "" if dtype_name is None else f"-{dtype_name}"
    folder = Path(tempfile.gettempdir()) / f"millstream-bench-{shape}{suffix}-{VERSION}"
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = SHAPES[shape]
    is_bert = config["model_type"] == "bert"
    mx.random.seed(0)
    dtype = getattr(mx, dtype_name or ("float32" if is_bert else "bfloat16"))
    tensors = {
        name: mx.ones(size, dtype) if "norm.weight" in name.lower() else (mx.random.normal(size) * 0.02).astype(dtype)
        for name, size in (_bert(config) if is_bert else _qwen3(config))
    }
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "mlx"})
    _write_tokenizer(folder)
    parts = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [
        {"idx": n, "path": path, "type": f"sentence_transformers.models.{name}"} for n, (path, name) in enumerate(parts)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    mode = "pooling_mode_mean_tokens" if is_bert else "pooling_mode_lasttoken"
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({mode: True}))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _bert(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, inner = config["hidden_size"], config["intermediate_size"]
    for name, rows in (
        ("word", "vocab_size"),
        ("position", "max_position_embeddings"),
        ("token_type", "type_vocab_size"),
    ):
        yield f"embeddings.{name}_embeddings.weight", (config[rows], width)
    norms, linears = ["embeddings.LayerNorm"], []
    for number in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{number}."
        names = [f"attention.self.{part}" for part in ("query", "key", "value")] + ["attention.output.dense"]
        linears += [(at + name, width, width) for name in names]
        linears += [(f"{at}intermediate.dense", inner, width), (f"{at}output.dense", width, inner)]
        norms += [f"{at}attention.output.LayerNorm", f"{at}output.LayerNorm"]
    for name, out, into in linears:
        yield f"{name}.weight", (out, into)
        yield f"{name}.bias", (out,)
    for name in norms:
        yield f"{name}.weight", (width,)
        yield f"{name}.bias", (width,)


def _qwen3(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield "embed_tokens.weight", (config["vocab_size"], width)
    yield "norm.weight", (width,)
    for number in range(config["num_hidden_layers"]):
        at = f"layers.{number}."
        for name, out in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            yield f"{at}self_attn.{name}.weight", (out, width)
        yield f"{at}self_attn.o_proj.weight", (width, queries)
        yield f"{at}mlp.gate_proj.weight", (inner, width)
        yield f"{at}mlp.up_proj.weight", (inner, width)
        yield f"{at}mlp.down_proj.weight", (width, inner)
        for name, size in (("q_norm", head), ("k_norm", head)):
            yield f"{at}self_attn.{name}.weight", (size,)
        yield f"{at}input_layernorm.weight", (width,)
        yield f"{at}post_attention_layernorm.weight", (width,)


def linear_sizes(shape: str) -> list[tuple[int, int]]:
    """(outputs, inputs) of the linear layers of one of its layers, those of one input side by side."""
    config = SHAPES[shape]
    width, inner = config["hidden_size"], config["intermediate_size"]
    if config["model_type"] == "bert":
        return [(3 * width, width), (width, width), (inner, width), (width, inner)]
    queries, keys = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    return [(queries, width), (keys, width), (keys, width), (width, queries), *[(inner, width)] * 2, (width, inner)]


def input_flops(shape: str, length: int) -> float:
    """Floating point operations of the matmuls for one input of so many tokens, without padding. Causal attention needs
    half of the pairs."""
    config = SHAPES[shape]
    linear = 2 * length * sum(out * into for out, into in linear_sizes(shape))
    is_bert = config["model_type"] == "bert"
    width = config["hidden_size"] if is_bert else config["num_attention_heads"] * config["head_dim"]
    pairs = length * length if is_bert else length * (length + 1) / 2
    return float(config["num_hidden_layers"] * (linear + 4 * pairs * width))


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *dict.fromkeys(WORDS)]
    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(names[:4])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]", "model_max_length": 512}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
