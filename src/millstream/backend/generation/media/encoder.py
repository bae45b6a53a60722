"""Media on their way into a model: encoded a slice a step, then read with the prompt they stand in. Owner only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from millstream.backend.generation.caches.batch_caches import RowCaches
from millstream.backend.generation.media.features import Encoding, FeatureCache, Features, Tower
from millstream.backend.generation.media.language_parts import LanguagePart, SeenChunk
from millstream.backend.generation.media.mrope import Grid, lay_out, spans_of
from millstream.backend.generation.prefill.prefiller import Prefiller
from millstream.engine.generation.backend import EncodeMedia, Plan, Prefill
from millstream.engine.messages import Submit
from millstream.types import Media, Tensor

_TOKEN_NAMES = ("image_token_id", "image_token_index", "video_token_id", "video_token_index", "audio_token_id")
_GRID_NAMES = ("image_grid_thw", "video_grid_thw")


@dataclass(slots=True)
class _Row:
    """One request's media."""

    places: list[np.ndarray]
    """Of each, where its tokens stand in the prompt."""
    positions: np.ndarray | None
    shift: int
    features: dict[int, Features] = field(default_factory=dict)


_UNFIT = (ValueError, TypeError, LookupError, StopIteration)
"""What media raise that do not fit their prompt or their model."""


Encoded = tuple[tuple[int, int], ...]
"""How many media of which requests may be read now."""


class MediaEncoder:
    """The tower, what it has made of images lately, and what the rows that are being read need of that."""

    def __init__(self, part: LanguagePart, budget: int) -> None:
        """`budget`: bytes of features that are kept for later requests."""
        self._part = part
        self._tower = Tower(part.whole)
        self._cache = FeatureCache(budget)
        self._rows: dict[int, _Row] = {}
        self._pending: tuple[int, int, Encoding] | None = None
        config = part.whole.config
        known = [getattr(config, name, None) for name in _TOKEN_NAMES]
        self._tokens = np.array([token for token in known if token is not None])

    @property
    def kinds(self) -> tuple[str, ...]:
        config = self._part.whole.config
        video = getattr(config, "video_token_id", None) is not None
        audio = getattr(self._part.whole, "audio_tower", None) is not None
        return ("image", *(("video",) if video else ()), *(("audio",) if audio else ()))

    @property
    def nbytes(self) -> int:
        return self._cache.nbytes

    @property
    def kept(self) -> int:
        """How many media have their features kept."""
        return len(self._cache)

    def step(self, plan: Plan, prompts: Prefiller) -> tuple[list[mx.array], Encoded, dict[int, str]]:
        """Read a plan's chunks and look at its media: what to evaluate, what was seen, and whose media do not fit."""
        failed: dict[int, str] = {}
        arrays = prompts.prefill(self._admit(plan.prefill, failed))
        seen: list[tuple[int, int]] = []
        for look in plan.encode:
            request_id = look.request.request_id
            try:
                seen.append((request_id, self._look(look, arrays)))
            except _UNFIT as error:
                failed[request_id] = _unfit(error)
        return arrays, tuple(seen), failed

    def _admit(self, chunks: Sequence[Prefill], failed: dict[int, str]) -> list[Prefill]:
        """The chunks without those of requests whose media do not fit their prompts: these fail alone."""
        fit: list[Prefill] = []
        for chunk in chunks:
            try:
                if chunk.request.media:
                    self._row(chunk.request)
                fit.append(chunk)
            except _UNFIT as error:
                failed[chunk.request.request_id] = _unfit(error)
        return fit

    def read(self, submit: Submit, start: int, end: int, caches: RowCaches) -> None:
        """Run `prompt[start:end]` into the row's caches. Features of what stands there must have been looked at."""
        row = self._row(submit)
        cuts = [tuple(np.searchsorted(places, (start, end))) for places in row.places]
        inside = [number for number, (first, last) in enumerate(cuts) if last > first]
        tokens = mx.array([submit.prompt[start:end]], dtype=mx.int32)
        if not inside:
            # The layers are asked for text; only its place may be another than the number of tokens before it.
            shift = 0 if row.positions is None else int(row.positions[0, start]) - start
            self._part(tokens, cache=caches, shifts=shift)
            return
        plain = self._part.whole.get_input_embeddings(tokens, None)
        places = mx.array(np.concatenate([row.places[n][slice(*cuts[n])] for n in inside]) - start)
        features = [row.features[number] for number in inside]
        wanted = [slice(*cuts[number]) for number in inside]
        embeddings = plain.inputs_embeds
        vectors = mx.concatenate([each.tokens[cut] for each, cut in zip(features, wanted, strict=True)])
        embeddings[:, places] = vectors.astype(embeddings.dtype)[None]
        levels = zip(
            *(tuple(deep[cut] for deep in each.deep) for each, cut in zip(features, wanted, strict=True)), strict=True
        )
        chunk = SeenChunk(
            tokens,
            embeddings,
            plain.per_layer_inputs,
            places,
            tuple(mx.concatenate(list(level)) for level in levels),
            None if row.positions is None else row.positions[:, start:end],
            _blocks(submit, row.places, end),
        )
        self._part.read(chunk, caches)

    def shift(self, submit: Submit) -> int:
        """How much further a row's positions are than its tokens, once its prompt is read."""
        return self._row(submit).shift if submit.media and self._part.positional else 0

    def read_through(self, ids: Iterable[int]) -> None:
        """The prompts are read: their features are not needed any more."""
        for request_id in ids:
            if request_id in self._rows:
                self._rows[request_id].features.clear()

    def drop(self, ids: Iterable[int]) -> None:
        for request_id in ids:
            self._rows.pop(request_id, None)
            if self._pending is not None and self._pending[0] == request_id:
                self._pending = None

    def clear(self) -> None:
        """After a failed step: features may be half computed."""
        self._rows.clear()
        self._cache.clear()
        self._pending = None

    def _look(self, look: EncodeMedia, arrays: list[mx.array]) -> int:
        """Encode one, and take all that are at hand; how many the request may read now."""
        submit, row = look.request, self._row(look.request)
        number, encoded = look.first, False
        while number < len(submit.media):
            digest = submit.media[number].digest
            features = row.features.get(number) or self._cache.get(digest)
            if features is None and not encoded:
                features, encoded = self._encode(submit, number, look.tokens, arrays), True
            if features is None:
                break
            if features.tokens.shape[0] != len(row.places[number]):
                raise ValueError(f"{features.tokens.shape[0]} features for {len(row.places[number])} tokens")
            row.features[number] = features
            self._cache.put(digest, features)
            number += 1
        return number

    def _encode(self, submit: Submit, number: int, tokens: int, arrays: list[mx.array]) -> Features | None:
        """Go on with a medium of a request, or begin with it; its features if that was the last slice."""
        at = (submit.request_id, number)
        if self._pending is None or self._pending[:2] != at:
            places = self._rows[submit.request_id].places[number]
            prompt = [submit.prompt[place] for place in places]
            self._pending = (*at, self._tower.encode(lambda: self._run(submit.media[number], prompt)))
        made, features = self._pending[2].advance(float(tokens) * self._part.numbers)
        arrays += made
        if features is not None:
            self._pending = None
        return features

    def _run(self, media: Media, prompt: Sequence[int]) -> Features:
        """Write down the tower's work. A prompt of nothing but the medium's own tokens: all of its embeddings are the
        features, in the form that this family gives them."""
        tensors = {name: _array(tensor) for name, tensor in media.tensors}
        whole = self._part.whole
        if self._part.positional:
            grid = next(tensors[name] for name in _GRID_NAMES if name in tensors)
            pixels = next(tensors[name] for name in ("pixel_values", "pixel_values_videos") if name in tensors)
            out = whole.vision_tower(
                pixels.astype(whole.vision_tower.patch_embed.proj.weight.dtype), grid.reshape(-1, 3)
            )
            return Features(out[0], tuple(out[1])) if isinstance(out, tuple) else Features(out)
        tokens = mx.array([prompt], dtype=mx.int32)
        pixels = tensors.pop("pixel_values", None)
        out = whole.get_input_embeddings(tokens, pixels, mask=mx.ones(tokens.shape, dtype=mx.int32), **tensors)
        return Features(out.inputs_embeds[0])

    def _row(self, submit: Submit) -> _Row:
        if submit.request_id not in self._rows:
            prompt = np.array(submit.prompt)
            places = [self._places(prompt, media) for media in submit.media]
            positions, shift = None, 0
            if self._part.positional:
                grids = [self._grid(media) for media in submit.media]
                spans = [span for each, grid in zip(places, grids, strict=True) for span in spans_of(each, grid)]
                positions, shift = lay_out(len(prompt), spans)
            self._rows[submit.request_id] = _Row(places, positions, shift)
        return self._rows[submit.request_id]

    def _places(self, prompt: np.ndarray, media: Media) -> np.ndarray:
        """Where features go: at the tokens that stand for media, not at what separates their rows."""
        inside = prompt[media.start : media.start + media.length]
        places = media.start + np.flatnonzero(np.isin(inside, self._tokens))
        if not len(places):
            raise ValueError(f"no token of a medium at {media.start} to {media.start + media.length} of the prompt")
        return places

    def _grid(self, media: Media) -> Grid:
        merge = self._part.whole.config.vision_config.spatial_merge_size
        tensor = next(tensor for name, tensor in media.tensors if name in _GRID_NAMES)
        frames, rows, columns = (int(value) for value in _numpy(tensor).reshape(-1))
        return frames, rows // merge, columns // merge


def _blocks(submit: Submit, places: Sequence[np.ndarray], end: int) -> np.ndarray:
    """Which image each of the first `end` tokens belongs to: -1 for text and sounds."""
    blocks = np.full(len(submit.prompt), -1)
    number = 0
    for media, at in zip(submit.media, places, strict=True):
        if media.kind != "audio":
            breaks = np.concatenate([[0], np.cumsum(np.diff(at) > 1)])
            blocks[at] = number + breaks
            number += int(breaks[-1]) + 1
    return blocks[:end]


def _unfit(error: Exception) -> str:
    return f"its media do not fit the model: {error or type(error).__name__}"


def _numpy(tensor: Tensor) -> np.ndarray:
    return np.frombuffer(tensor.data, dtype=tensor.dtype).reshape(tensor.shape)


def _array(tensor: Tensor) -> Any:
    return mx.array(_numpy(tensor))
