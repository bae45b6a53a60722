"""Tiny random encoders of many families, written as model folders with the names that Hugging Face's files have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from support.encoder_tokenizers import wordpiece

VOCAB = 220
"""At least what the tokenizer of `support.encoder_tokenizers` has."""
WIDTH, INNER, LAYERS, HEADS = 32, 48, 3, 4

_BERT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 256,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-5,
    "hidden_act": "gelu",
}
_FROM_PADDING = {**_BERT, "type_vocab_size": 1, "pad_token_id": 1, "max_position_embeddings": 258}
_DECODER = {**_BERT, "head_dim": 8, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}

FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {**_BERT, "pad_token_id": 0},
    "electra": {**_BERT, "embedding_size": 16},
    "roberta": _FROM_PADDING,
    "xlm-roberta": _FROM_PADDING,
    "camembert": _FROM_PADDING,
    "mpnet": {**_FROM_PADDING, "relative_attention_num_buckets": 32},
    "distilbert": {
        "vocab_size": VOCAB,
        "dim": WIDTH,
        "hidden_dim": INNER,
        "n_layers": LAYERS,
        "n_heads": HEADS,
        "max_position_embeddings": 256,
        "activation": "gelu",
    },
    "modernbert": {
        **_BERT,
        "norm_eps": 1e-5,
        "local_attention": 8,
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0,
        "local_rope_theta": 10000.0,
        "hidden_activation": "gelu",
    },
    "nomic_bert": {
        "vocab_size": VOCAB,
        "n_embd": WIDTH,
        "n_inner": INNER,
        "n_layer": LAYERS,
        "n_head": HEADS,
        "n_positions": 256,
        "type_vocab_size": 2,
        "layer_norm_epsilon": 1e-5,
        "activation_function": "swiglu",
        "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0,
        "prenorm": False,
    },
    "qwen3": {**_DECODER, "rope_theta": 1e6, "attention_bias": False},
    "gemma3_text": {
        **_DECODER,
        "sliding_window": 16,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 8,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
}
OWN = [family for family in FAMILIES if family not in ("qwen3", "gemma3_text")]
"""Families with modules of our own."""

Tensors = dict[str, NDArray[np.float32]]
Shapes = Iterator[tuple[str, tuple[int, ...]]]


def write_encoder(
    folder: Path,
    family: str,
    *,
    pooling: str = "mean",
    reranker: bool = False,
    tokenizer: bool = False,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """An embedding model in the layout of sentence-transformers, or a reranker."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": family, **FAMILIES[family], **changes}
    if reranker:
        config |= {"architectures": [f"{family.title()}ForSequenceClassification"], "num_labels": 1}
    else:
        _write_modules(folder, pooling)
    save_file(weights(config, reranker, seed), folder / "model.safetensors")
    _write(folder / "config.json", config)
    if tokenizer:
        backend = wordpiece()
        backend.enable_truncation(8)  # files of real models have both
        backend.enable_padding(length=8)
        backend.save(str(folder / "tokenizer.json"))
        _write(folder / "tokenizer_config.json", {})
    return folder


def weights(config: dict[str, Any], reranker: bool = False, seed: int = 0) -> Tensors:
    """Large enough that each part of the model shows in the result."""
    draw = np.random.default_rng(seed)
    tensors: Tensors = {}
    for name, shape in _shapes(config, reranker):
        values = draw.normal(size=shape).astype(np.float32)
        is_norm = len(shape) == 1 and "norm" in name.lower().replace("emb_ln", "norm")
        tensors[name] = values * np.float32(0.15) + np.float32(is_norm and name.endswith("weight"))
    return tensors


def _shapes(config: dict[str, Any], reranker: bool) -> Shapes:
    match config["model_type"]:
        case "distilbert":
            yield from _distilbert(config, reranker)
        case "modernbert":
            yield from _modernbert(config, reranker)
        case "nomic_bert":
            yield from _nomic(config)
        case "qwen3" | "gemma3_text":
            yield from _decoder(config)
        case _:
            yield from _bert(config, reranker)


def _bert(config: dict[str, Any], reranker: bool) -> Shapes:
    family, count = config["model_type"], config["num_hidden_layers"]
    own = {"xlm-roberta": "roberta", "camembert": "roberta"}.get(family, family)
    at = f"{own}." if reranker else ""
    width = config["hidden_size"]
    inner_width = config.get("embedding_size", width)
    yield f"{at}embeddings.word_embeddings.weight", (config["vocab_size"], inner_width)
    yield f"{at}embeddings.position_embeddings.weight", (config["max_position_embeddings"], inner_width)
    if family != "mpnet":
        yield f"{at}embeddings.token_type_embeddings.weight", (config["type_vocab_size"], inner_width)
    yield from _norm(f"{at}embeddings.LayerNorm", inner_width)
    if family == "electra":
        yield from _linear(f"{at}embeddings_project", width, inner_width)
    if family == "mpnet":
        buckets = config["relative_attention_num_buckets"]
        yield f"{at}encoder.relative_attention_bias.weight", (buckets, config["num_attention_heads"])
    attention = [f"attention.self.{name}" for name in ("query", "key", "value")] + ["attention.output.dense"]
    norm = "attention.output.LayerNorm"
    if family == "mpnet":
        attention, norm = [f"attention.attn.{name}" for name in "qkvo"], "attention.LayerNorm"
    for number in range(count):
        layer = f"{at}encoder.layer.{number}."
        for name in attention:
            yield from _linear(layer + name, width, width)
        yield from _norm(layer + norm, width)
        yield from _linear(f"{layer}intermediate.dense", config["intermediate_size"], width)
        yield from _linear(f"{layer}output.dense", width, config["intermediate_size"])
        yield from _norm(f"{layer}output.LayerNorm", width)
    if not reranker:
        return
    if family == "bert":
        yield from _linear("bert.pooler.dense", width, width)
        yield from _linear("classifier", 1, width)
    else:
        yield from _linear("classifier.dense", width, width)
        yield from _linear("classifier.out_proj", 1, width)


def _distilbert(config: dict[str, Any], reranker: bool) -> Shapes:
    at = "distilbert." if reranker else ""
    width, inner = config["dim"], config["hidden_dim"]
    yield f"{at}embeddings.word_embeddings.weight", (config["vocab_size"], width)
    yield f"{at}embeddings.position_embeddings.weight", (config["max_position_embeddings"], width)
    yield from _norm(f"{at}embeddings.LayerNorm", width)
    for number in range(config["n_layers"]):
        layer = f"{at}transformer.layer.{number}."
        for name in ("q_lin", "k_lin", "v_lin", "out_lin"):
            yield from _linear(f"{layer}attention.{name}", width, width)
        yield from _norm(f"{layer}sa_layer_norm", width)
        yield from _linear(f"{layer}ffn.lin1", inner, width)
        yield from _linear(f"{layer}ffn.lin2", width, inner)
        yield from _norm(f"{layer}output_layer_norm", width)
    if reranker:
        yield from _linear("pre_classifier", width, width)
        yield from _linear("classifier", 1, width)


def _modernbert(config: dict[str, Any], reranker: bool) -> Shapes:
    at = "model." if reranker else ""
    width, inner = config["hidden_size"], config["intermediate_size"]
    yield f"{at}embeddings.tok_embeddings.weight", (config["vocab_size"], width)
    yield f"{at}embeddings.norm.weight", (width,)
    for number in range(config["num_hidden_layers"]):
        layer = f"{at}layers.{number}."
        if number:
            yield f"{layer}attn_norm.weight", (width,)
        yield f"{layer}attn.Wqkv.weight", (3 * width, width)
        yield f"{layer}attn.Wo.weight", (width, width)
        yield f"{layer}mlp_norm.weight", (width,)
        yield f"{layer}mlp.Wi.weight", (2 * inner, width)
        yield f"{layer}mlp.Wo.weight", (width, inner)
    yield f"{at}final_norm.weight", (width,)
    if reranker:
        yield "head.dense.weight", (width, width)
        yield "head.norm.weight", (width,)
        yield from _linear("classifier", 1, width)


def _nomic(config: dict[str, Any]) -> Shapes:
    width, inner = config["n_embd"], config["n_inner"]
    yield "embeddings.word_embeddings.weight", (config["vocab_size"], width)
    yield "embeddings.token_type_embeddings.weight", (config["type_vocab_size"], width)
    yield from _norm("emb_ln", width)
    for number in range(config["n_layer"]):
        layer = f"encoder.layers.{number}."
        yield f"{layer}attn.Wqkv.weight", (3 * width, width)
        yield f"{layer}attn.out_proj.weight", (width, width)
        yield f"{layer}mlp.fc11.weight", (inner, width)
        yield f"{layer}mlp.fc12.weight", (inner, width)
        yield f"{layer}mlp.fc2.weight", (width, inner)
        yield from _norm(f"{layer}norm1", width)
        yield from _norm(f"{layer}norm2", width)


def _decoder(config: dict[str, Any]) -> Shapes:
    """Without the name of the part that is left of the language model, as embedding models are published."""
    width, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config["model_type"] == "gemma3_text":
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    yield "embed_tokens.weight", (config["vocab_size"], width)
    for number in range(config["num_hidden_layers"]):
        layer = f"layers.{number}."
        yield f"{layer}self_attn.q_proj.weight", (queries, width)
        yield f"{layer}self_attn.k_proj.weight", (keys, width)
        yield f"{layer}self_attn.v_proj.weight", (keys, width)
        yield f"{layer}self_attn.o_proj.weight", (width, queries)
        yield f"{layer}self_attn.q_norm.weight", (head,)
        yield f"{layer}self_attn.k_norm.weight", (head,)
        for name in ("gate_proj", "up_proj"):
            yield f"{layer}mlp.{name}.weight", (config["intermediate_size"], width)
        yield f"{layer}mlp.down_proj.weight", (width, config["intermediate_size"])
        for name in norms:
            yield f"{layer}{name}.weight", (width,)
    yield "norm.weight", (width,)


def _linear(name: str, out: int, into: int) -> Shapes:
    yield f"{name}.weight", (out, into)
    yield f"{name}.bias", (out,)


def _norm(name: str, width: int) -> Shapes:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def _write_modules(folder: Path, pooling: str) -> None:
    package = "sentence_transformers.models."
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    listed = [
        {"idx": n, "name": str(n), "path": path, "type": package + kind} for n, (path, kind) in enumerate(modules)
    ]
    _write(folder / "modules.json", listed)
    (folder / "1_Pooling").mkdir(exist_ok=True)
    _write(folder / "1_Pooling" / "config.json", {"pooling_mode": pooling})


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))
