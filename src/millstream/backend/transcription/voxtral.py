"""Mistral's Voxtral on the modules of mlx-audio: Whisper's encoder, and a language model that writes what it heard."""

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
from millstream.backend.transcription.spectrograms import WhisperSpectrogram
from millstream.backend.transcription.writers import WrittenFamily, token_bound
from millstream.backend.weights.library import LibraryModel, fill, stored_weights
from millstream.engine.protocols import Progress, ignore_progress
from millstream.engine.transcription.plan import WindowStart
from millstream.errors import ModelError
from millstream.models.transcription_rows import TOKENS_PER_SECOND
from millstream.speech_types import SPEECH_RATE, Samples

ENDS = ("</s>", "[/INST]", "<pad>")


def load_voxtral(
    folder: Path, config: dict[str, Any], vocabulary: Vocabulary, device: Device, report: Progress = ignore_progress
) -> WrittenFamily:
    from mlx_audio.stt.models.voxtral.voxtral import Model, ModelConfig

    model = Model(ModelConfig.from_dict(config))
    fill(model, _with_layout_of_mlx(model, stored_weights(folder)), config, folder)
    loaded = LibraryModel(model, device, report)
    return WrittenFamily(Voxtral(model, vocabulary, loaded.notes), loaded)


def _with_layout_of_mlx(model: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Convolutions of PyTorch have their axes in another order. The library guesses that by which one is longer."""
    for layer in ("conv1", "conv2"):
        name, wanted = f"audio_tower.{layer}.weight", getattr(model.audio_tower, layer).weight.shape
        if name in weights and weights[name].shape != wanted:
            weights[name] = weights[name].transpose(0, 2, 1)
    return weights


class Voxtral:
    def __init__(self, model: Any, vocabulary: Vocabulary, notes: tuple[str, ...]) -> None:
        from mlx_audio.lm.models.cache import KVCache

        self._model = model
        self._vocabulary = vocabulary
        self._notes = notes
        self._new_cache = KVCache
        self._spectrogram = WhisperSpectrogram(model.config.audio_config.num_mel_bins)
        self._frames = 2 * model.config.audio_config.max_source_positions
        self._dtype = model.audio_tower.conv1.weight.dtype

    @property
    def traits(self) -> Traits:
        seconds = self._frames * WhisperSpectrogram.HOP / SPEECH_RATE
        return Traits(seconds, start_windows=2, notes=self._notes)

    @property
    def ends(self) -> frozenset[int]:
        return frozenset(token for name in ENDS if (token := self._vocabulary.token(name)) is not None)

    def begin(self, samples: Samples, window: WindowStart) -> tuple[Any, mx.array]:
        # Its encoder has a fixed length, like Whisper's: silence fills the window.
        whole = np.pad(samples, (0, self._frames * WhisperSpectrogram.HOP - len(samples)))
        audio = self._model.get_audio_embeds(mx.array(self._spectrogram(whole)[None]).astype(self._dtype))
        after = [self._named("[/INST]")]
        if window.options.language is not None:
            after += self._vocabulary.encode(f"lang:{window.options.language}")
        before = [self._named(name) for name in ("<s>", "[INST]", "[BEGIN_AUDIO]")]
        embed = self._model.language_model.model.embed_tokens
        start, end = embed(mx.array(before)), embed(mx.array([*after, self._named("[TRANSCRIBE]")]))
        cache = [self._new_cache() for _ in self._model.language_model.layers]
        return cache, self._logits(mx.concatenate([start, audio.astype(start.dtype), end])[None], cache)

    def next(self, cache: Any, token: int) -> mx.array:
        return self._logits(self._model.language_model.model.embed_tokens(mx.array([[token]])), cache)

    def most_tokens(self, seconds: float) -> int:
        return token_bound(seconds, TOKENS_PER_SECOND)

    def read(self, tokens: Sequence[int]) -> tuple[str | None, str]:
        return None, self._vocabulary.decode(tokens)

    def _logits(self, x: mx.array, cache: Any) -> mx.array:
        """Of the last position alone: the vocabulary is large, and a prompt is long."""
        language = self._model.language_model
        hidden = language.model(None, cache=cache, input_embeddings=x)[:, -1:]
        tied = self._model.config.text_config.tie_word_embeddings
        logits: mx.array = language.model.embed_tokens.as_linear(hidden) if tied else language.lm_head(hidden)
        return logits

    def _named(self, name: str) -> int:
        token = self._vocabulary.token(name)
        if token is None:
            raise ModelError(f"its tokenizer has no token {name}")
        return token
