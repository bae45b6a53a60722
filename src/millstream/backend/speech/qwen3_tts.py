"""Qwen3-TTS on the modules of mlx-audio: a language model that writes codes, and a codec that turns them into sound.
Owner only."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from millstream.backend import mlx_audio_import  # noqa: F401  before all that imports mlx-audio
from millstream.backend.device import Device
from millstream.backend.speech.library_pieces import only_piece, seed_of
from millstream.backend.speech.settings import SpeechSettings
from millstream.backend.speech.speaker import SpeakerTraits
from millstream.backend.weights.library import LibraryModel, fill, stored_weights
from millstream.backend.weights.materialize import reachable_arrays
from millstream.engine.speech.plan import PieceInput
from millstream.engine.token_ids import check_token_ids
from millstream.errors import ModelError
from millstream.models.checks import check_folder
from millstream.models.files import read_optional_object
from millstream.models.speech_layout import CODEC
from millstream.speech_types import Samples, Voice

STEP_SECONDS = 0.4
"""Of sound per step: so long a cancellation waits."""
CODES_PER_SECOND = 12.5
LEAST_CODES, CODES_PER_CHARACTER = 75, 6
"""A text of so many characters is not longer: half a second per character is slow in every script."""

_LANGUAGES = {
    "zh": "chinese", "en": "english", "ja": "japanese", "ko": "korean", "de": "german", "fr": "french",
    "ru": "russian", "pt": "portuguese", "es": "spanish", "it": "italian",
}  # fmt: skip


def load_qwen3_tts(settings: SpeechSettings, device: Device) -> Qwen3TtsSpeaker:
    from mlx_audio.tts.models.qwen3_tts.qwen3_tts import Model, ModelConfig

    folder = settings.path
    if settings.encode is None:
        raise ModelError(f"{folder}: has no tokenizer")
    config = check_folder(folder)
    model = Model(ModelConfig.from_dict(config))
    fill(model, model.sanitize(stored_weights(folder)), config, folder)
    loaded = LibraryModel(model, device)
    codec = _codec(folder / CODEC)
    LibraryModel(codec, device)
    model.load_speech_tokenizer(codec)
    model.load_generate_config(read_optional_object(folder / "generation_config.json"))
    model.tokenizer = _Tokenizer(settings, len(model.talker.get_text_embeddings().weight))
    return Qwen3TtsSpeaker(model, loaded.dtype, loaded.notes)


def _codec(folder: Path) -> Any:
    """Without the encoder, which only learns voices from recordings."""
    from mlx_audio.tts.models.qwen3_tts.config import Qwen3TTSTokenizerConfig
    from mlx_audio.tts.models.qwen3_tts.speech_tokenizer import Qwen3TTSSpeechTokenizer

    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder}: is missing. The folder needs the codec too, in {CODEC}/")
    config = check_folder(folder)
    known = ("input_sample_rate", "output_sample_rate", "decode_upsample_rate", "encode_downsample_rate")
    built = Qwen3TTSTokenizerConfig(
        encoder_config=None,
        decoder_config=json.loads(json.dumps(config.get("decoder_config") or {})),
        **{name: config[name] for name in known if name in config},
    )
    codec = Qwen3TTSSpeechTokenizer(built)
    fill(codec, _sanitized(codec, stored_weights(folder)), {}, folder)
    return codec


def _sanitized(codec: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """The library turns PyTorch's files into its own layout. Those that it has written itself are as it wants them."""
    if any(name.endswith(".codebook.embed.weight") for name in weights):
        return weights
    found: dict[str, mx.array] = codec.sanitize(weights)
    return found


class _Tokenizer:
    """What the library calls its tokenizer."""

    def __init__(self, settings: SpeechSettings, rows: int) -> None:
        assert settings.encode is not None
        self._encode = settings.encode
        self._rows = rows

    def encode(self, text: str) -> list[int]:
        tokens = list(self._encode(text))
        check_token_ids(tokens, self._rows, where="the text", param="input")
        return tokens


class Qwen3TtsSpeaker:
    """Implements `speaker.Speaker`. The codec's state is in the model, so one text is spoken at a time."""

    def __init__(self, model: Any, dtype: str, notes: tuple[str, ...]) -> None:
        self._model = model
        self._sort: str = model.config.tts_model_type
        self.voices: Sequence[Voice] = [Voice(name) for name in model.supported_speakers]
        if self._sort == "custom_voice" and not self.voices:
            raise ModelError("its configuration names no speakers (talker_config.spk_id)")
        self.sample_rate: int = model.sample_rate
        self.dtype = dtype
        self.batch_pieces = self.open_batches = 1
        described = self._sort == "voice_design"
        styled = self._sort == "custom_voice" and model.config.tts_model_size != "0b6"
        self.traits = SpeakerTraits(
            takes_speed=False, takes_instructions=described or styled, needs_instructions=described, notes=notes
        )

    @property
    def weights(self) -> Sequence[mx.array]:
        return list(reachable_arrays(self._model))

    def speak(self, pieces: Sequence[PieceInput]) -> Iterator[Sequence[Samples]]:
        piece, voice = only_piece(pieces, self.voices)
        mx.random.seed(seed_of(piece))
        text = _plain(piece.piece.text)
        spoken = self._model.generate(
            text,
            voice=voice or None,
            instruct=_plain(piece.instructions or "") or None,
            lang_code=_LANGUAGES.get(piece.language or "", "auto"),
            split_pattern="",
            max_tokens=LEAST_CODES + CODES_PER_CHARACTER * len(text),
            stream=True,
            streaming_interval=STEP_SECONDS,
        )
        for part in spoken:
            yield [np.asarray(part.audio.astype(mx.float32))]


def _plain(text: str) -> str:
    """A user's text may not have control tokens, which are written as `<|…|>`."""
    return text.replace("<|", "< |")
