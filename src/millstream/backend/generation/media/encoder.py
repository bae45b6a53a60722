"""Encodes a request's media a slice per step, then prefills the prompt chunks that contain them. Owner only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from millstream.backend.generation.caches.batch_caches import RowCaches
from millstream.backend.generation.media.features import Encoding, FeatureCache, Features, Tower
from millstream.backend.generation.media.language_parts import LanguagePart, MediaChunk
from millstream.backend.generation.media.mrope import Grid, grid_spans, mrope_positions
from millstream.backend.generation.prefill.prefiller import Passes, Prefiller
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import EncodeMedia, Plan, Prefill
from millstream.types import Media, Tensor

_TOKEN_NAMES = ("image_token_id", "image_token_index", "video_token_id", "video_token_index", "audio_token_id")
_GRID_NAMES = ("image_grid_thw", "video_grid_thw")


@dataclass(slots=True)
class _Row:
    """The media of one request."""

    token_indices: list[np.ndarray]
    """Per media item, the indices of its tokens in the prompt."""
    positions: np.ndarray | None
    rope_delta: int
    features: dict[int, Features] = field(default_factory=dict)


_MISMATCH = (ValueError, TypeError, LookupError, StopIteration)
"""Errors of media that do not match their prompt or the model."""


Encoded = tuple[tuple[int, int], ...]
"""Per request id, how many of its media items are encoded, counted from the first."""


class MediaEncoder:
    """Owns the towers, the cache of features, and the features of requests in prefill."""

    def __init__(self, part: LanguagePart, budget: int) -> None:
        """`budget`: bytes of features that are cached for later requests."""
        self._part = part
        self._tower = Tower(part.vlm)
        self._cache = FeatureCache(budget)
        self._rows: dict[int, _Row] = {}
        self._pending: tuple[int, int, Encoding] | None = None
        config = part.vlm.config
        token_ids = [getattr(config, name, None) for name in _TOKEN_NAMES]
        self._media_tokens = np.array([token for token in token_ids if token is not None])

    @property
    def kinds(self) -> tuple[str, ...]:
        config = self._part.vlm.config
        video = getattr(config, "video_token_id", None) is not None
        audio = getattr(self._part.vlm, "audio_tower", None) is not None
        return ("image", *(("video",) if video else ()), *(("audio",) if audio else ()))

    @property
    def nbytes(self) -> int:
        return self._cache.nbytes

    @property
    def cached_items(self) -> int:
        """How many media items have cached features."""
        return len(self._cache)

    def step(self, plan: Plan, prefiller: Prefiller) -> tuple[Passes, Encoded, dict[int, str]]:
        """Prefill the plan's chunks and encode its media. Returns the arrays to evaluate, how many media items are
        encoded per request, and the errors of requests whose media do not match."""
        failed: dict[int, str] = {}
        passes = prefiller.prefill(self._matching(plan.prefill, failed))
        arrays: list[mx.array] = []
        encoded: list[tuple[int, int]] = []
        for order in plan.encode:
            request_id = order.request.request_id
            try:
                encoded.append((request_id, self._advance(order, arrays)))
            except _MISMATCH as error:
                failed[request_id] = _mismatch(error)
        return [*passes, arrays], tuple(encoded), failed

    def _matching(self, chunks: Sequence[Prefill], failed: dict[int, str]) -> list[Prefill]:
        """The chunks without those of requests whose media do not match their prompt: only these fail."""
        matching: list[Prefill] = []
        for chunk in chunks:
            try:
                if chunk.request.media:
                    self._row(chunk.request)
                matching.append(chunk)
            except _MISMATCH as error:
                failed[chunk.request.request_id] = _mismatch(error)
        return matching

    def prefill(self, submit: Generate, start: int, end: int, caches: RowCaches) -> None:
        """Run `prompt[start:end]` into the row's caches. The media in it must be encoded."""
        row = self._row(submit)
        bounds = [tuple(np.searchsorted(indices, (start, end))) for indices in row.token_indices]
        inside = [number for number, (first, last) in enumerate(bounds) if last > first]
        tokens = mx.array([submit.prompt[start:end]], dtype=mx.int32)
        if not inside:
            # A text chunk: only its positions may differ from the token count.
            delta = 0 if row.positions is None else int(row.positions[0, start]) - start
            self._part(tokens, cache=caches, rope_deltas=delta)
            return
        text = self._part.vlm.get_input_embeddings(tokens, None)
        media_indices = mx.array(np.concatenate([row.token_indices[n][slice(*bounds[n])] for n in inside]) - start)
        features = [row.features[number] for number in inside]
        slices = [slice(*bounds[number]) for number in inside]
        embeddings = text.inputs_embeds
        vectors = mx.concatenate([each.tokens[part] for each, part in zip(features, slices, strict=True)])
        embeddings[:, media_indices] = vectors.astype(embeddings.dtype)[None]
        levels = zip(
            *(tuple(level[part] for level in each.deepstack) for each, part in zip(features, slices, strict=True)),
            strict=True,
        )
        chunk = MediaChunk(
            tokens,
            embeddings,
            text.per_layer_inputs,
            media_indices,
            tuple(mx.concatenate(list(level)) for level in levels),
            None if row.positions is None else row.positions[:, start:end],
            _image_numbers(submit, row.token_indices, end),
        )
        self._part.prefill(chunk, caches)

    def rope_delta(self, submit: Generate) -> int:
        """The difference between a row's positions and its token count, once its prefill is complete."""
        return self._row(submit).rope_delta if submit.media and self._part.uses_mrope else 0

    def release_features(self, ids: Iterable[int]) -> None:
        """Free the features of requests whose prefill is complete."""
        for request_id in ids:
            if request_id in self._rows:
                self._rows[request_id].features.clear()

    def drop(self, ids: Iterable[int]) -> None:
        for request_id in ids:
            self._rows.pop(request_id, None)
            if self._pending is not None and self._pending[0] == request_id:
                self._pending = None

    def clear(self) -> None:
        """Drop everything after a failed step: features may be partly computed."""
        self._rows.clear()
        self._cache.clear()
        self._pending = None

    def _advance(self, order: EncodeMedia, arrays: list[mx.array]) -> int:
        """Continue encoding one media item, and take all that are cached. Returns how many items of the request are
        encoded."""
        submit, row = order.request, self._row(order.request)
        number, has_encoded = order.first, False
        while number < len(submit.media):
            digest = submit.media[number].digest
            features = row.features.get(number) or self._cache.get(digest)
            if features is None and not has_encoded:
                features, has_encoded = self._encode(submit, number, order.tokens, arrays), True
            if features is None:
                break
            expected = len(row.token_indices[number])
            if features.tokens.shape[0] != expected:
                raise ValueError(f"{features.tokens.shape[0]} features for {expected} tokens")
            row.features[number] = features
            self._cache.put(digest, features)
            number += 1
        return number

    def _encode(self, submit: Generate, number: int, tokens: int, arrays: list[mx.array]) -> Features | None:
        """Start or continue to encode a media item. Returns its features after the last slice, otherwise None."""
        key = (submit.request_id, number)
        if self._pending is None or self._pending[:2] != key:
            indices = self._rows[submit.request_id].token_indices[number]
            media_tokens = [submit.prompt[index] for index in indices]
            self._pending = (*key, self._tower.encode(lambda: self._run_tower(submit.media[number], media_tokens)))
        due, features = self._pending[2].advance(float(tokens) * self._part.multiplications_per_token)
        arrays += due
        if features is not None:
            self._pending = None
        return features

    def _run_tower(self, media: Media, media_tokens: Sequence[int]) -> Features:
        """Call the tower, lazily. Families without M-RoPE get a prompt of the item's own tokens only: all of its
        embeddings are then the features, in the form that the family expects."""
        tensors = {name: _array(tensor) for name, tensor in media.tensors}
        vlm = self._part.vlm
        if self._part.uses_mrope:
            grid = next(tensors[name] for name in _GRID_NAMES if name in tensors)
            pixels = next(tensors[name] for name in ("pixel_values", "pixel_values_videos") if name in tensors)
            out = vlm.vision_tower(pixels.astype(vlm.vision_tower.patch_embed.proj.weight.dtype), grid.reshape(-1, 3))
            return Features(out[0], tuple(out[1])) if isinstance(out, tuple) else Features(out)
        tokens = mx.array([media_tokens], dtype=mx.int32)
        pixels = tensors.pop("pixel_values", None)
        out = vlm.get_input_embeddings(tokens, pixels, mask=mx.ones(tokens.shape, dtype=mx.int32), **tensors)
        return Features(out.inputs_embeds[0])

    def _row(self, submit: Generate) -> _Row:
        if submit.request_id not in self._rows:
            prompt = np.array(submit.prompt)
            token_indices = [self._token_indices(prompt, media) for media in submit.media]
            positions, rope_delta = None, 0
            if self._part.uses_mrope:
                grids = [self._grid(media) for media in submit.media]
                pairs = zip(token_indices, grids, strict=True)
                spans = [span for indices, grid in pairs for span in grid_spans(indices, grid)]
                positions, rope_delta = mrope_positions(len(prompt), spans)
            self._rows[submit.request_id] = _Row(token_indices, positions, rope_delta)
        return self._rows[submit.request_id]

    def _token_indices(self, prompt: np.ndarray, media: Media) -> np.ndarray:
        """The indices of tokens that features replace: the media tokens, not the separators between their rows."""
        end = media.start + media.length
        indices = media.start + np.flatnonzero(np.isin(prompt[media.start : end], self._media_tokens))
        if not len(indices):
            raise ValueError(f"there is no media token at {media.start} to {end} of the prompt")
        return indices

    def _grid(self, media: Media) -> Grid:
        merge = self._part.vlm.config.vision_config.spatial_merge_size
        tensor = next(tensor for name, tensor in media.tensors if name in _GRID_NAMES)
        frames, rows, columns = (int(value) for value in _numpy(tensor).reshape(-1))
        return frames, rows // merge, columns // merge


def _image_numbers(submit: Generate, token_indices: Sequence[np.ndarray], end: int) -> np.ndarray:
    """The number of the image that each of the first `end` tokens belongs to: -1 for text and audio."""
    numbers = np.full(len(submit.prompt), -1)
    next_number = 0
    for media, indices in zip(submit.media, token_indices, strict=True):
        if media.kind != "audio":
            frames = np.concatenate([[0], np.cumsum(np.diff(indices) > 1)])
            numbers[indices] = next_number + frames
            next_number += int(frames[-1]) + 1
    return numbers[:end]


def _mismatch(error: Exception) -> str:
    return f"the media of this request do not match the model or the prompt: {error or type(error).__name__}"


def _numpy(tensor: Tensor) -> np.ndarray:
    return np.frombuffer(tensor.data, dtype=tensor.dtype).reshape(tensor.shape)


def _array(tensor: Tensor) -> Any:
    return mx.array(_numpy(tensor))
