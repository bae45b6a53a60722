"""Useful Sensors' Moonshine on the modules of mlx-audio: from samples to text, without a spectrogram."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from millstream.backend import mlx_audio_import  # noqa: F401  before all that imports mlx-audio
from millstream.backend.device import Device
from millstream.backend.transcription.family import Traits
from millstream.backend.transcription.settings import Vocabulary
from millstream.backend.transcription.writers import WrittenFamily, token_bound
from millstream.backend.weights.library import LibraryModel, fill, stored_weights
from millstream.engine.protocols import Progress, ignore_progress
from millstream.engine.transcription.plan import WindowStart
from millstream.models.transcription_rows import WINDOW_SECONDS
from millstream.speech_types import SPEECH_RATE, Samples

LEAST_SAMPLES = SPEECH_RATE // 10
"""The convolutions need some: shorter windows get silence after them."""
TOKENS_PER_SECOND = 13.0
"""Its authors' bound for languages other than English; English has half as many."""


def load_moonshine(
    folder: Path, config: dict[str, Any], vocabulary: Vocabulary, device: Device, report: Progress = ignore_progress
) -> WrittenFamily:
    from mlx_audio.stt.models.moonshine.moonshine import Model, ModelConfig

    model = Model(ModelConfig.from_dict(config))
    fill(model, _sanitized(model, stored_weights(folder)), config, folder)
    loaded = LibraryModel(model, device, report)
    return WrittenFamily(Moonshine(model, vocabulary, loaded.notes), loaded)


def _sanitized(model: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """The library takes the files for PyTorch's; those that were converted have the layout of MLX already."""
    convolution = weights.get("encoder.conv1.weight")
    if convolution is not None and convolution.shape == model.encoder.conv1.weight.shape:
        return weights
    found: dict[str, mx.array] = model.sanitize(weights)
    return found


class Moonshine:
    def __init__(self, model: Any, vocabulary: Vocabulary, notes: tuple[str, ...]) -> None:
        self._model = model
        self._vocabulary = vocabulary
        self._notes = notes
        self._dtype = model.decoder.embed_tokens.weight.dtype
        if not mx.issubdtype(self._dtype, mx.floating):  # quantised
            self._dtype = model.encoder.conv1.weight.dtype

    @property
    def traits(self) -> Traits:
        return Traits(WINDOW_SECONDS, start_windows=4, notes=self._notes)

    @property
    def ends(self) -> frozenset[int]:
        return frozenset({self._model.config.eos_token_id})

    def begin(self, samples: Samples, window: WindowStart) -> tuple[Any, mx.array]:
        # Not in one batch: the encoder normalises over the whole length, padding included.
        padded = np.pad(samples, (0, max(0, LEAST_SAMPLES - len(samples))))
        cache = {"audio": self._model.encoder(mx.array(padded[None]).astype(self._dtype)), "layers": None}
        return cache, self.next(cache, self._model.config.decoder_start_token_id)

    def next(self, cache: Any, token: int) -> mx.array:
        hidden, cache["layers"] = self._model.decoder(mx.array([[token]]), cache["audio"], cache=cache["layers"])
        logits: mx.array = self._model._get_logits(hidden[:, -1])
        return logits

    def most_tokens(self, seconds: float) -> int:
        return min(token_bound(seconds, TOKENS_PER_SECOND), int(self._model.config.max_position_embeddings))

    def read(self, tokens: Sequence[int]) -> tuple[str | None, str]:
        return None, self._vocabulary.decode(tokens)
