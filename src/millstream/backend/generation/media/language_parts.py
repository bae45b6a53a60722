"""The language model inside an mlx-vlm model, with the interface of mlx-lm's models: tokens and caches in, logits out.

mlx-vlm stores the state of a request (positions, rope deltas) on the model. Here it is an argument, because rows share
the model and must not see each other's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import cache as mlx_cache
from mlx_lm.models.base import create_attention_mask

from millstream.backend.generation.caches.batch_caches import RowCaches
from millstream.backend.generation.media.mrope import GridPositions, TextPositions, patch_rotary
from millstream.errors import ModelError


@dataclass(frozen=True, slots=True)
class MediaChunk:
    """A prefill chunk of one prompt with media in it."""

    tokens: mx.array
    embeddings: mx.array
    """Of the tokens, with the features in place of the media tokens."""
    per_layer: mx.array | None
    """Gemma 4's per-layer embeddings."""
    media_indices: mx.array
    """The indices of the media tokens in this chunk."""
    deepstack: tuple[mx.array, ...]
    """Vectors that the first layers add at these indices."""
    positions: np.ndarray | None
    """(3, length), for models with M-RoPE."""
    image_numbers: np.ndarray
    """For each token of the prompt up to the end of this chunk, the number of its image, or -1."""


class LanguagePart:
    """For families whose language model has no state of its own and one-dimensional positions."""

    uses_mrope = False
    """Whether positions have three dimensions, and rows have a rope delta."""
    whole_media = False
    """Whether the tokens of an image attend to each other, so that a chunk must not split an image."""

    def __init__(self, vlm: Any) -> None:
        self.vlm = vlm
        self.language = vlm.language_model
        self.multiplications_per_token = sum(
            value.size for name, value in tree_flatten(self.language.parameters()) if "embed" not in name
        )

    def named_modules(self) -> Any:
        return self.language.named_modules()

    def parameters(self) -> Any:
        return self.language.parameters()

    @property
    def layers(self) -> Any:
        return self.language.layers

    def make_cache(self) -> RowCaches:
        """Caches of mlx-lm, which the batch works with, instead of mlx-vlm's own."""
        if not hasattr(self.language, "make_cache"):
            return [mlx_cache.KVCache() for _ in self.layers]
        return [_to_mlx_lm(cache) for cache in self.language.make_cache()]

    def __call__(self, tokens: mx.array, cache: RowCaches, rope_deltas: Any = None) -> mx.array:
        """`rope_deltas`: per row, the difference between its positions and its token count."""
        logits: mx.array = self.language(tokens, cache=cache).logits
        return logits

    def prefill(self, chunk: MediaChunk, cache: RowCaches) -> None:
        """Run a chunk into the caches of its row."""
        self.language(chunk.tokens, inputs_embeds=chunk.embeddings, cache=cache)


class QwenPart(LanguagePart):
    """Qwen: M-RoPE positions, and deepstack features that the first layers add."""

    uses_mrope = True

    def __init__(self, vlm: Any) -> None:
        super().__init__(vlm)
        self._inner = self.language.model
        if not patch_rotary(self._inner.layers):
            raise ModelError(f"{vlm.config.model_type}: the rotary embedding of this model is not supported")
        if hasattr(self._inner, "_deepstack_process"):
            self._inner.__class__ = type("Deepstack", (type(self._inner),), {"_deepstack_process": _add_deepstack})

    def __call__(self, tokens: mx.array, cache: RowCaches, rope_deltas: Any = None) -> mx.array:
        offset = cache[0].offset
        # A copy: the cache advances the same array in place while the layers run.
        offset = offset + (0 if rope_deltas is None else rope_deltas)
        hidden = self._inner(tokens, cache=cache, position_ids=TextPositions(offset))
        if self.language.args.tie_word_embeddings:
            logits: mx.array = self._inner.embed_tokens.as_linear(hidden)
        else:
            logits = self.language.lm_head(hidden)
        return logits

    def prefill(self, chunk: MediaChunk, cache: RowCaches) -> None:
        assert chunk.positions is not None, "this family has M-RoPE positions"
        positions = GridPositions(mx.array(chunk.positions)[:, None])
        deepstack: dict[str, Any] = {}
        if chunk.deepstack:
            deepstack = {"visual_pos_masks": chunk.media_indices, "deepstack_visual_embeds": chunk.deepstack}
        self._inner(chunk.tokens, inputs_embeds=chunk.embeddings, cache=cache, position_ids=positions, **deepstack)


def _add_deepstack(self: Any, hidden: mx.array, indices: mx.array, features: mx.array) -> mx.array:
    """For one row, at known indices; mlx-vlm's own function waits for the device to find them in a mask."""
    return hidden.at[:, indices].add(features.astype(hidden.dtype)[None])


class Gemma4Part(LanguagePart):
    """Gemma 4: per-layer embeddings, and in some sizes image tokens that attend to each other."""

    def __init__(self, vlm: Any) -> None:
        super().__init__(vlm)
        inner = self.language.model
        self.whole_media = inner.config.use_bidirectional_attention == "vision"
        inner.__class__ = type("ImageMasks", (type(inner),), {"_make_masks": _make_masks})

    def prefill(self, chunk: MediaChunk, cache: RowCaches) -> None:
        image_numbers = chunk.image_numbers if self.whole_media else None
        self.language(
            chunk.tokens,
            inputs_embeds=chunk.embeddings,
            cache=cache,
            per_layer_inputs=chunk.per_layer,
            mm_token_type_ids=image_numbers,
        )


def _make_masks(
    self: Any, hidden: mx.array, caches: Sequence[Any], image_numbers: np.ndarray | None = None
) -> list[Any]:
    """A mask per layer: causal, within the sliding window if the layer has one, bidirectional inside an image."""
    masks: dict[str, Any] = {}
    for layer, cache in zip(self.layers, caches, strict=True):
        kind = layer.layer_type
        if kind not in masks:
            window = self.window_size if kind == "sliding_attention" else None
            bidirectional = image_numbers is not None and hidden.shape[1] > 1
            mask = create_attention_mask(hidden, cache, window_size=window, return_array=bidirectional)
            if image_numbers is not None and bidirectional:
                mask = mask | _same_image(image_numbers, *mask.shape[-2:])
            masks[kind] = mask
    return [masks[layer.layer_type] for layer in self.layers]


def _same_image(image_numbers: np.ndarray, queries: int, keys: int) -> mx.array:
    """Which of the last `queries` tokens are in the same image as which of the last `keys`."""
    query_images, key_images = image_numbers[-queries:, None], image_numbers[None, -keys:]
    return mx.array((query_images == key_images) & (query_images >= 0))


class Ministral3Part(LanguagePart):
    """Ministral 3: queries are scaled by their position, each row by its own (Llama 4's attention scaling)."""

    def __init__(self, vlm: Any) -> None:
        super().__init__(vlm)
        rope = self.language.config.rope_parameters
        self._beta = rope["llama_4_scaling_beta"]
        self._original_length = rope["original_max_position_embeddings"]

    def __call__(self, tokens: mx.array, cache: RowCaches, rope_deltas: Any = None) -> mx.array:
        hidden = self._run(self.language.model.embed_tokens(tokens), cache)
        if self.language.config.tie_word_embeddings:
            logits: mx.array = self.language.model.embed_tokens.as_linear(hidden)
        else:
            logits = self.language.lm_head(hidden)
        return logits

    def prefill(self, chunk: MediaChunk, cache: RowCaches) -> None:
        self._run(chunk.embeddings, cache)

    def _run(self, hidden: mx.array, cache: RowCaches) -> mx.array:
        inner = self.language.model
        positions = mx.arange(hidden.shape[1]) + mx.array(cache[0].offset).reshape(-1, 1)
        scale = 1 + self._beta * mx.log(1 + mx.floor(mx.maximum(positions, 0) / self._original_length))
        scale = scale[:, None, :, None].astype(hidden.dtype)
        full_mask = create_attention_mask(hidden, cache[inner.fa_idx])
        window_mask = full_mask
        if inner.swa_idx is not None:
            window_mask = create_attention_mask(hidden, cache[inner.swa_idx], window_size=inner.sliding_window)
        for layer, layer_cache in zip(inner.layers, cache, strict=True):
            mask = window_mask if layer.use_sliding else full_mask
            hidden = layer(hidden, scale, mask, cache=layer_cache)
        out: mx.array = inner.norm(hidden)
        return out


def language_part(vlm: Any) -> LanguagePart:
    """The language part for the model's family."""
    family = vlm.config.model_type
    if family.startswith("qwen"):
        return QwenPart(vlm)
    if family == "gemma4":
        return Gemma4Part(vlm)
    if family == "mistral3" and vlm.config.text_config.model_type == "ministral3":
        return Ministral3Part(vlm)
    return LanguagePart(vlm)


def _to_mlx_lm(cache: Any) -> Any:
    kind = type(cache).__name__
    if kind == "KVCache":
        return mlx_cache.KVCache()
    if kind == "RotatingKVCache":
        return mlx_cache.RotatingKVCache(max_size=cache.max_size, keep=cache.keep)
    raise ModelError(f"the model has an mlx-vlm cache of class {kind}, which is not supported")
