"""Encoders in NumPy and float64, one input at a time: what ours are compared with. Written from the papers and the
files' names, and shares no code with the server."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_erf = np.vectorize(math.erf, otypes=[np.float64])


class Weights:
    def __init__(self, tensors: Mapping[str, Any], *prefixes: str) -> None:
        self._tensors = {}
        for name, tensor in tensors.items():
            for prefix in prefixes:
                name = name.removeprefix(prefix)
            self._tensors[name] = np.asarray(tensor, np.float64)

    def __getitem__(self, name: str) -> Array:
        return self._tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def linear(self, x: Array, name: str) -> Array:
        y = x @ self[f"{name}.weight"].T
        return y + self[f"{name}.bias"] if f"{name}.bias" in self else y

    def norm(self, x: Array, name: str, eps: float) -> Array:
        centred = x - x.mean(-1, keepdims=True)
        y = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * self[f"{name}.weight"]
        return y + self[f"{name}.bias"] if f"{name}.bias" in self else y


def bert(config: Mapping[str, Any], weights: Weights, ids: Sequence[int], second: Sequence[int] | None = None) -> Array:
    """The hidden states of BERT, RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA and MPNet. `second`: 1 for tokens of the
    second text."""
    family = config["model_type"]
    eps = config["layer_norm_eps"]
    heads = config["num_attention_heads"]
    first = config["pad_token_id"] + 1 if family in ("roberta", "xlm-roberta", "camembert", "mpnet") else 0
    tokens = np.array(ids)
    x = weights["embeddings.word_embeddings.weight"][tokens]
    x = x + weights["embeddings.position_embeddings.weight"][first : first + len(tokens)]
    if family != "mpnet":
        x = (
            x
            + weights["embeddings.token_type_embeddings.weight"][np.zeros(len(ids), int) if second is None else second]
        )
    x = weights.norm(x, "embeddings.LayerNorm", eps)
    if "embeddings_project.weight" in weights:
        x = weights.linear(x, "embeddings_project")
    bias = _mpnet_bias(weights, len(tokens)) if family == "mpnet" else None
    names = [f"attention.self.{part}" for part in ("query", "key", "value")] + ["attention.output.dense"]
    norm = "attention.output.LayerNorm"
    if family == "mpnet":
        names, norm = [f"attention.attn.{part}" for part in "qkvo"], "attention.LayerNorm"
    for number in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{number}."
        queries, keys, values = (weights.linear(x, at + name) for name in names[:3])
        attended = weights.linear(attention(queries, keys, values, heads, bias), at + names[3])
        x = weights.norm(x + attended, at + norm, eps)
        inner = gelu(weights.linear(x, f"{at}intermediate.dense"))
        x = weights.norm(x + weights.linear(inner, f"{at}output.dense"), f"{at}output.LayerNorm", eps)
    return x


def distilbert(config: Mapping[str, Any], weights: Weights, ids: Sequence[int]) -> Array:
    x = weights["embeddings.word_embeddings.weight"][np.array(ids)]
    x = x + weights["embeddings.position_embeddings.weight"][: len(ids)]
    x = weights.norm(x, "embeddings.LayerNorm", 1e-12)
    for number in range(config["n_layers"]):
        at = f"transformer.layer.{number}."
        queries, keys, values = (weights.linear(x, f"{at}attention.{name}_lin") for name in "qkv")
        attended = weights.linear(attention(queries, keys, values, config["n_heads"]), f"{at}attention.out_lin")
        x = weights.norm(x + attended, f"{at}sa_layer_norm", 1e-12)
        inner = gelu(weights.linear(x, f"{at}ffn.lin1"))
        x = weights.norm(x + weights.linear(inner, f"{at}ffn.lin2"), f"{at}output_layer_norm", 1e-12)
    return x


def nomic_bert(config: Mapping[str, Any], weights: Weights, ids: Sequence[int]) -> Array:
    eps, heads = config["layer_norm_epsilon"], config["n_head"]
    x = weights["embeddings.word_embeddings.weight"][np.array(ids)]
    x = weights.norm(x + weights["embeddings.token_type_embeddings.weight"][0], "emb_ln", eps)
    for number in range(config["n_layer"]):
        at = f"encoder.layers.{number}."
        queries, keys, values = np.split(weights.linear(x, f"{at}attn.Wqkv"), 3, axis=-1)
        queries, keys = (rotate(part, heads, config["rotary_emb_base"]) for part in (queries, keys))
        attended = weights.linear(attention(queries, keys, values, heads), f"{at}attn.out_proj")
        x = weights.norm(x + attended, f"{at}norm1", eps)
        gate = weights.linear(x, f"{at}mlp.fc12")
        inner = weights.linear(x, f"{at}mlp.fc11") * gate / (1 + np.exp(-gate))
        x = weights.norm(x + weights.linear(inner, f"{at}mlp.fc2"), f"{at}norm2", eps)
    return x


def modernbert(config: Mapping[str, Any], weights: Weights, ids: Sequence[int]) -> Array:
    eps, heads = config["norm_eps"], config["num_attention_heads"]
    x = weights.norm(weights["embeddings.tok_embeddings.weight"][np.array(ids)], "embeddings.norm", eps)
    apart = np.abs(np.arange(len(ids))[:, None] - np.arange(len(ids))[None, :])
    near = np.where(apart <= config["local_attention"] // 2, 0, -np.inf)
    for number in range(config["num_hidden_layers"]):
        at = f"layers.{number}."
        is_global = number % config["global_attn_every_n_layers"] == 0
        theta = config["global_rope_theta" if is_global else "local_rope_theta"]
        inner = weights.norm(x, f"{at}attn_norm", eps) if number else x
        queries, keys, values = np.split(weights.linear(inner, f"{at}attn.Wqkv"), 3, axis=-1)
        queries, keys = (rotate(part, heads, theta) for part in (queries, keys))
        x = x + weights.linear(attention(queries, keys, values, heads, None if is_global else near), f"{at}attn.Wo")
        gated, gate = np.split(weights.linear(weights.norm(x, f"{at}mlp_norm", eps), f"{at}mlp.Wi"), 2, axis=-1)
        x = x + weights.linear(gelu(gated) * gate, f"{at}mlp.Wo")
    return weights.norm(x, "final_norm", eps)


def attention(queries: Array, keys: Array, values: Array, heads: int, bias: Array | None = None) -> Array:
    """`bias`: for each pair of positions, or for each head and pair."""
    width = queries.shape[1] // heads
    parts = []
    for head in range(heads):
        span = slice(head * width, (head + 1) * width)
        scores = queries[:, span] @ keys[:, span].T / math.sqrt(width)
        if bias is not None:
            scores = scores + (bias[head] if bias.ndim == 3 else bias)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        parts.append(shares / shares.sum(-1, keepdims=True) @ values[:, span])
    return np.concatenate(parts, axis=-1)


def rotate(x: Array, heads: int, theta: float) -> Array:
    """Rotary positions: the first half of a head's numbers with the second."""
    length, width = x.shape[0], x.shape[1] // heads
    angles = np.arange(length)[:, None] * theta ** (-np.arange(0, width, 2) / width)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = np.split(x.reshape(length, heads, width), 2, axis=-1)
    turned = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return np.asarray(turned.reshape(length, heads * width))


def gelu(x: Array) -> Array:
    return np.asarray(x * 0.5 * (1 + _erf(x / math.sqrt(2))))


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def unit(x: Array) -> Array:
    return np.asarray(x / np.linalg.norm(x))


def _mpnet_bias(weights: Weights, length: int) -> Array:
    """As T5's: 16 buckets for each direction, half of them for single distances, the rest up to 128 by logarithm."""
    table = weights["encoder.relative_attention_bias.weight"]
    bias = np.empty((table.shape[1], length, length))
    for query in range(length):
        for key in range(length):
            apart = abs(query - key)
            bucket = apart
            if apart >= 8:
                bucket = min(15, 8 + int(math.log(apart / 8) / math.log(128 / 8) * 8))
            bias[:, query, key] = table[bucket + (16 if key > query else 0)]
    return bias
