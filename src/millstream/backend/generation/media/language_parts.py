"""The language model inside of an mlx-vlm model, called as mlx-lm's models are: tokens and caches in, logits out.

mlx-vlm keeps what belongs to a request (positions, rope deltas) on the model. Here it is an argument: rows share a
model, and none may find what another has left there.
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
from millstream.backend.generation.media.mrope import Grids, Line, adopt_rotary
from millstream.errors import ModelError


@dataclass(frozen=True, slots=True)
class SeenChunk:
    """A piece of one prompt with media inside."""

    tokens: mx.array
    embeddings: mx.array
    """Of the tokens, with features at their places."""
    per_layer: mx.array | None
    """Gemma 4's embeddings for each layer."""
    places: mx.array
    """Where in this piece features stand."""
    deep: tuple[mx.array, ...]
    """What the first layers add there."""
    positions: np.ndarray | None
    """(3, length), where positions have three dimensions."""
    blocks: np.ndarray
    """For each token of the prompt up to the end of this piece, the number of the image it belongs to, or -1."""


class LanguagePart:
    """For families whose language model keeps nothing and has one dimension of positions."""

    positional = False
    """Whether rows have shifts."""
    whole_media = False

    def __init__(self, whole: Any) -> None:
        self.whole = whole
        self.language = whole.language_model
        self.numbers = sum(
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
        """Caches of mlx-lm, which our batches are made for, in place of mlx-vlm's own."""
        if not hasattr(self.language, "make_cache"):
            return [mlx_cache.KVCache() for _ in self.layers]
        return [_ours(cache) for cache in self.language.make_cache()]

    def __call__(self, tokens: mx.array, cache: RowCaches, shifts: Any = None) -> mx.array:
        """`shifts`: how much further each row's positions are than its tokens."""
        logits: mx.array = self.language(tokens, cache=cache).logits
        return logits

    def read(self, chunk: SeenChunk, cache: RowCaches) -> None:
        """Run a piece of a prompt into a row's own caches."""
        self.language(chunk.tokens, inputs_embeds=chunk.embeddings, cache=cache)


class GridPart(LanguagePart):
    """Qwen: positions in three dimensions, and features that the first layers add."""

    positional = True

    def __init__(self, whole: Any) -> None:
        super().__init__(whole)
        self._inner = self.language.model
        if not adopt_rotary(self._inner.layers):
            raise ModelError(f"{whole.config.model_type}: a rotary embedding that is not known here")
        if hasattr(self._inner, "_deepstack_process"):
            self._inner.__class__ = type("Deep", (type(self._inner),), {"_deepstack_process": _add_deep})

    def __call__(self, tokens: mx.array, cache: RowCaches, shifts: Any = None) -> mx.array:
        offset = cache[0].offset
        # A copy: a cache counts on in the same array while the layers run.
        offset = offset + (0 if shifts is None else shifts)
        hidden = self._inner(tokens, cache=cache, position_ids=Line(offset))
        if self.language.args.tie_word_embeddings:
            logits: mx.array = self._inner.embed_tokens.as_linear(hidden)
        else:
            logits = self.language.lm_head(hidden)
        return logits

    def read(self, chunk: SeenChunk, cache: RowCaches) -> None:
        assert chunk.positions is not None, "media of this family have grids"
        positions = Grids(mx.array(chunk.positions)[:, None])
        deep: dict[str, Any] = {}
        if chunk.deep:
            deep = {"visual_pos_masks": chunk.places, "deepstack_visual_embeds": chunk.deep}
        self._inner(chunk.tokens, inputs_embeds=chunk.embeddings, cache=cache, position_ids=positions, **deep)


def _add_deep(self: Any, hidden: mx.array, places: mx.array, features: mx.array) -> mx.array:
    """For one row, at its places; mlx-vlm's own waits for the device to find them in a mask."""
    return hidden.at[:, places].add(features.astype(hidden.dtype)[None])


class BlockPart(LanguagePart):
    """Gemma 4: embeddings for each layer, and in some sizes tokens of an image that attend to each other."""

    def __init__(self, whole: Any) -> None:
        super().__init__(whole)
        inner = self.language.model
        self.whole_media = inner.config.use_bidirectional_attention == "vision"
        inner.__class__ = type("Blocks", (type(inner),), {"_make_masks": _masks})

    def read(self, chunk: SeenChunk, cache: RowCaches) -> None:
        blocks = chunk.blocks if self.whole_media else None
        self.language(
            chunk.tokens,
            inputs_embeds=chunk.embeddings,
            cache=cache,
            per_layer_inputs=chunk.per_layer,
            mm_token_type_ids=blocks,
        )


def _masks(self: Any, hidden: mx.array, caches: Sequence[Any], blocks: np.ndarray | None = None) -> list[Any]:
    """A mask for each layer: causal, in a window where the layer has one, open inside of an image."""
    made: dict[str, Any] = {}
    for layer, cache in zip(self.layers, caches, strict=True):
        kind = layer.layer_type
        if kind not in made:
            window = self.window_size if kind == "sliding_attention" else None
            opened = blocks is not None and hidden.shape[1] > 1
            mask = create_attention_mask(hidden, cache, window_size=window, return_array=opened)
            made[kind] = mask | _same_block(blocks, *mask.shape[-2:]) if blocks is not None and opened else mask
    return [made[layer.layer_type] for layer in self.layers]


def _same_block(blocks: np.ndarray, rows: int, columns: int) -> mx.array:
    """Which of the last `rows` tokens may see which of the last `columns`, whatever their order."""
    seeing, seen = blocks[-rows:, None], blocks[None, -columns:]
    return mx.array((seeing == seen) & (seeing >= 0))


class ScaledPart(LanguagePart):
    """Ministral 3: queries far into a context are scaled, each row by its own place."""

    def __init__(self, whole: Any) -> None:
        super().__init__(whole)
        rope = self.language.config.rope_parameters
        self._slope = rope["llama_4_scaling_beta"]
        self._length = rope["original_max_position_embeddings"]

    def __call__(self, tokens: mx.array, cache: RowCaches, shifts: Any = None) -> mx.array:
        hidden = self._run(self.language.model.embed_tokens(tokens), cache)
        if self.language.config.tie_word_embeddings:
            logits: mx.array = self.language.model.embed_tokens.as_linear(hidden)
        else:
            logits = self.language.lm_head(hidden)
        return logits

    def read(self, chunk: SeenChunk, cache: RowCaches) -> None:
        self._run(chunk.embeddings, cache)

    def _run(self, hidden: mx.array, cache: RowCaches) -> mx.array:
        inner = self.language.model
        places = mx.arange(hidden.shape[1]) + mx.array(cache[0].offset).reshape(-1, 1)
        scale = 1 + self._slope * mx.log(1 + mx.floor(mx.maximum(places, 0) / self._length))
        scale = scale[:, None, :, None].astype(hidden.dtype)
        full = create_attention_mask(hidden, cache[inner.fa_idx])
        window = full
        if inner.swa_idx is not None:
            window = create_attention_mask(hidden, cache[inner.swa_idx], window_size=inner.sliding_window)
        for layer, row in zip(inner.layers, cache, strict=True):
            hidden = layer(hidden, scale, window if layer.use_sliding else full, cache=row)
        out: mx.array = inner.norm(hidden)
        return out


def language_part(whole: Any) -> LanguagePart:
    family = whole.config.model_type
    if family.startswith("qwen"):
        return GridPart(whole)
    if family == "gemma4":
        return BlockPart(whole)
    if family == "mistral3" and whole.config.text_config.model_type == "ministral3":
        return ScaledPart(whole)
    return LanguagePart(whole)


def _ours(cache: Any) -> Any:
    kind = type(cache).__name__
    if kind == "KVCache":
        return mlx_cache.KVCache()
    if kind == "RotatingKVCache":
        return mlx_cache.RotatingKVCache(max_size=cache.max_size, keep=cache.keep)
    raise ModelError(f"{kind}: a cache of mlx-vlm that is not known here")
