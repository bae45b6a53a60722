"""Language models of mlx-lm as encoders: their hidden states before the head. Owner only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import _get_classes, dequantize_model, load_model

from millstream.backend.layers.cpu_attention import cpu_attention
from millstream.backend.layers.cpu_linear import mkl_layout_pays, use_mkl_layout
from millstream.backend.layers.patch_layers import patch_function
from millstream.backend.weights.materialize import embedding_rows
from millstream.errors import ModelError


def load_decoder(folder: Path, dtype: mx.Dtype | None, *, head: bool) -> Any:
    """The language model, not evaluated. Embedding models are often published without a head, and without the name of
    the part that is left. `head`: load the head as well, if it has one of its own."""
    if head:
        model, _ = load_model(folder, lazy=True)
        return _unpacked(model, dtype)

    def classes(config: dict[str, Any]) -> tuple[type, type]:
        model_class, arguments_class = _get_classes(config)

        class WithoutHead(model_class):  # type: ignore[misc, valid-type]
            def sanitize(self, weights: dict[str, Any]) -> dict[str, Any]:
                kept = (name for name in weights if "_Dense." not in name and not name.startswith("lm_head."))
                named = {_inner(name): weights[name] for name in kept}
                return super().sanitize(named) if hasattr(super(), "sanitize") else named

        return WithoutHead, arguments_class

    model, _ = load_model(folder, lazy=True, model_config={"tie_word_embeddings": True}, get_model_classes=classes)
    return _unpacked(model, dtype)


def use_cpu_layers(model: Any) -> None:
    """Replace layers by those that are faster on x86_64 CPUs, as for text generation."""
    if mkl_layout_pays():
        use_mkl_layout(model)
        patch_function(model, "scaled_dot_product_attention", cpu_attention)


def _unpacked(model: Any, dtype: mx.Dtype | None) -> Any:
    if dtype is not None:
        dequantize_model(model)
        model.set_dtype(dtype)
    return model


def _inner(name: str) -> str:
    return name if name.startswith("model.") else f"model.{name}"


class CausalBody:
    """Tokens attend to earlier ones. Padding comes after them, so that it needs no mask."""

    max_tokens: int | None = None

    def __init__(self, model: Any) -> None:
        self._body = model.model
        self.vocab_size = embedding_rows(model)

    def __call__(self, ids: mx.array, keep: mx.array | None, types: mx.array | None) -> mx.array:
        hidden: mx.array = self._body(ids)
        return hidden


class Gemma3Body:
    """Gemma 3 with attention in both directions: in most layers within a window, half of it on each side."""

    max_tokens: int | None = None

    def __init__(self, model: Any, config: dict[str, Any]) -> None:
        self._body = model.model
        self.vocab_size = embedding_rows(model)
        self._every = int(config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6)
        self._reach = int(config["sliding_window"]) // 2

    def __call__(self, ids: mx.array, keep: mx.array | None, types: mx.array | None) -> mx.array:
        body = self._body
        length = ids.shape[1]
        x = body.embed_tokens(ids)
        x = x * mx.array(body.args.hidden_size**0.5, mx.bfloat16).astype(x.dtype)
        mask = None if keep is None else keep[:, None, None, :]
        near_mask = mask
        if length > self._reach + 1:
            places = mx.arange(length)
            near = (mx.abs(places[:, None] - places[None, :]) <= self._reach)[None, None]
            near_mask = near if mask is None else near & mask
        for number, layer in enumerate(body.layers):
            is_global = number % self._every == self._every - 1
            x = layer(x, mask if is_global else near_mask, None)
        hidden: mx.array = body.norm(x)
        return hidden


def answer_rows(model: Any, tokens: tuple[int, int]) -> mx.array:
    """The rows of the head for two tokens, of which the next one is compared."""
    if max(tokens) >= embedding_rows(model):
        raise ModelError(f"the answers no and yes are the tokens {tokens}, which the model has no embeddings for")
    ids = mx.array(list(tokens))
    head = model.get("lm_head")
    rows: mx.array
    if head is None:
        rows = model.model.embed_tokens(ids)
        return rows
    if "scales" not in head:
        rows = head.weight[ids]
        return rows
    biases = head.biases[ids] if "biases" in head else None
    return mx.dequantize(
        head.weight[ids], head.scales[ids], biases, group_size=head.group_size, bits=head.bits, mode=head.mode
    )
