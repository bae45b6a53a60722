"""Qwen3-ASR on the modules of mlx-audio: a language model that reads encoded audio and writes its language and text."""

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
from millstream.models.transcription_rows import TOKENS_PER_SECOND, WINDOW_SECONDS
from millstream.speech_types import SPEECH_RATE, Samples

LEAST_SAMPLES = SPEECH_RATE
"""The library pads shorter audio to this, and so does what the model learned from."""

LANGUAGES = {
    "ar": "Arabic", "cs": "Czech", "da": "Danish", "de": "German", "el": "Greek", "en": "English", "es": "Spanish",
    "fa": "Persian", "fi": "Finnish", "fil": "Filipino", "fr": "French", "hi": "Hindi", "hu": "Hungarian",
    "id": "Indonesian", "it": "Italian", "ja": "Japanese", "ko": "Korean", "mk": "Macedonian", "ms": "Malay",
    "nl": "Dutch", "pl": "Polish", "pt": "Portuguese", "ro": "Romanian", "ru": "Russian", "sv": "Swedish",
    "th": "Thai", "tr": "Turkish", "vi": "Vietnamese", "yue": "Cantonese", "zh": "Chinese",
}  # fmt: skip
_CODES = {name.lower(): code for code, name in LANGUAGES.items()}

TEXT_FOLLOWS = "<asr_text>"
"""The model writes `language English<asr_text>And so …`."""


def load_qwen3_asr(
    folder: Path, config: dict[str, Any], vocabulary: Vocabulary, device: Device, report: Progress = ignore_progress
) -> WrittenFamily:
    from mlx_audio.stt.models.qwen3_asr.config import ModelConfig
    from mlx_audio.stt.models.qwen3_asr.qwen3_asr import Qwen3ASRModel

    settings = ModelConfig.from_dict(config)
    if not isinstance(settings, ModelConfig):
        raise ModelError(f"{folder}: this is Qwen3's forced aligner: it needs the text, and does not find it out")
    model = Qwen3ASRModel(settings)
    weights = stored_weights(folder)
    ours = model.sanitize(weights)
    if model.lm_head is not None:  # the library leaves it out, tied to the embedding or not
        ours |= {name.removeprefix("thinker."): each for name, each in weights.items() if "lm_head" in name}
    fill(model, ours, config, folder)
    loaded = LibraryModel(model, device, report)
    return WrittenFamily(Qwen3Asr(model, vocabulary, loaded.notes), loaded)


class Qwen3Asr:
    def __init__(self, model: Any, vocabulary: Vocabulary, notes: tuple[str, ...]) -> None:
        from mlx_audio.lm.models.cache import KVCache

        self._model = model
        self._vocabulary = vocabulary
        self._notes = notes
        self._new_cache = KVCache
        self._spectrogram = WhisperSpectrogram(model.config.audio_config.num_mel_bins)
        self._dtype = model.audio_tower.conv2d1.weight.dtype
        self._text_follows = vocabulary.token(TEXT_FOLLOWS)
        names = {name.lower() for name in model.config.support_languages} or set(_CODES)
        self._languages = tuple(sorted(code for name, code in _CODES.items() if name in names))

    @property
    def traits(self) -> Traits:
        # It takes longer windows, but others wait for a window, and windows run side by side.
        return Traits(
            WINDOW_SECONDS,
            languages=self._languages,
            detects_language=True,
            takes_prompt=True,
            vocab_size=len(self._model.model.embed_tokens.weight),
            start_windows=2,
            notes=self._notes,
        )

    @property
    def ends(self) -> frozenset[int]:
        found = {self._vocabulary.token(name) for name in ("<|im_end|>", "<|endoftext|>")}
        return frozenset(token for token in found if token is not None)

    def begin(self, samples: Samples, window: WindowStart) -> tuple[Any, mx.array]:
        padded = np.pad(samples, (0, max(0, LEAST_SAMPLES - len(samples))))
        frames = mx.array(self._spectrogram(padded).T[None]).astype(self._dtype)
        audio = self._model.get_audio_features(frames)
        before, after = self._prompt(window)
        embed = self._model.model.embed_tokens
        start, end = embed(mx.array(before)), embed(mx.array(after))
        cache = [self._new_cache() for _ in self._model.layers]
        x = mx.concatenate([start, audio.astype(start.dtype), end])[None]
        return cache, self._logits(x, cache)

    def next(self, cache: Any, token: int) -> mx.array:
        return self._logits(self._model.model.embed_tokens(mx.array([[token]])), cache)

    def most_tokens(self, seconds: float) -> int:
        return 8 + token_bound(seconds, TOKENS_PER_SECOND)

    def read(self, tokens: Sequence[int]) -> tuple[str | None, str]:
        marker = self._text_follows
        place = list(tokens).index(marker) if marker is not None and marker in tokens else 0
        named = self._vocabulary.decode(tokens[:place]).strip()
        if not named.startswith("language"):
            return None, self._vocabulary.decode(tokens)
        # It says "language None" where nobody speaks.
        code = _CODES.get(named.removeprefix("language").strip().lower())
        return code, self._vocabulary.decode(tokens[place + 1 :])

    def _logits(self, x: mx.array, cache: Any) -> mx.array:
        """Of the last position alone: the vocabulary is large, and a prompt is long."""
        hidden = self._model.model(inputs_embeds=x, cache=cache)[:, -1:]
        head = self._model.lm_head
        logits: mx.array = head(hidden) if head is not None else self._model.model.embed_tokens.as_linear(hidden)
        return logits

    def _prompt(self, window: WindowStart) -> tuple[list[int], list[int]]:
        """The tokens before the audio and after it."""
        encode = self._vocabulary.encode
        context = f"{window.options.prompt}\n" if window.options.prompt else ""
        begin, end = self._named("<|im_start|>"), self._named("<|im_end|>")
        before = [begin, *encode(f"system\n{context}"), end, *encode("\n"), begin, *encode("user\n")]
        after = [self._named("<|audio_end|>"), end, *encode("\n"), begin, *encode("assistant\n")]
        if (code := window.options.language) is not None:
            after += [*encode(f"language {LANGUAGES.get(code, code)}"), self._named(TEXT_FOLLOWS)]
        return [*before, self._named("<|audio_start|>")], after

    def _named(self, name: str) -> int:
        token = self._vocabulary.token(name)
        if token is None:
            raise ModelError(f"its tokenizer has no token {name}")
        return token
