"""What a folder says about a transcription model: its family, and for Whisper its sizes, in both layouts in use.

Hugging Face's folders have `d_model`, `encoder_layers` and so on; those that were converted for MLX have OpenAI's,
`n_mels`, `n_audio_state` and so on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream.errors import ModelError
from millstream.models.files import read_object, read_optional_object

FAMILIES = {
    "whisper": "whisper",
    "parakeet": "parakeet",
    "moonshine": "moonshine",
    "qwen3_asr": "qwen3_asr",
    "voxtral": "voxtral",
}
"""Values of `model_type` in config.json, and the family that serves them."""

LIBRARY_FAMILIES = frozenset({"parakeet", "moonshine", "qwen3_asr", "voxtral"})
"""Those that need mlx-audio."""


def transcription_family(config: Mapping[str, Any]) -> str | None:
    """The family of a transcription model; None if it is a model of another kind."""
    if "n_mels" in config and "n_audio_state" in config:
        return "whisper"
    if is_parakeet(config):
        return "parakeet"
    return FAMILIES.get(str(config.get("model_type", "")).lower())


def is_parakeet(config: Mapping[str, Any]) -> bool:
    """NVIDIA NeMo's configurations have no `model_type`: they name the class that was trained."""
    target, encoder = config.get("target"), config.get("encoder")
    return (
        isinstance(target, str)
        and target.startswith("nemo.collections.asr.models.")
        and isinstance(encoder, dict)
        and encoder.get("self_attention_model") is not None
        and "transf_decoder" not in config  # Canary
    )


def has_vocabulary(family: str) -> bool:
    """True if its vocabulary is in files of its own. Parakeet's is in config.json."""
    return family != "parakeet"


def family_of(folder: Path) -> str:
    family = transcription_family(read_object(folder / "config.json"))
    if family is None:
        raise ModelError(f"{folder}: is not a transcription model. Supported: {', '.join(sorted(FAMILIES))}.")
    return family


@dataclass(frozen=True, slots=True)
class WhisperShape:
    mels: int
    audio_positions: int
    """Of the encoder's output: half as many as the spectrogram has frames."""
    width: int
    audio_heads: int
    audio_layers: int
    text_positions: int
    text_heads: int
    text_layers: int
    vocab: int
    multilingual: bool
    """False if it knows English alone."""
    alignment_heads: tuple[tuple[int, int], ...] = ()
    """(layer, head) of the cross attention that follows the speech, if the files name them."""
    suppressed: tuple[int, ...] | None = None
    """Tokens that are never written, if the files list them."""
    suppressed_first: tuple[int, ...] | None = None
    """Tokens that a text does not begin with."""

    @property
    def window_seconds(self) -> float:
        return self.audio_positions / 50

    @property
    def row_values(self) -> int:
        """Numbers that a row has in its KV caches: the audio's, and the text's."""
        return 2 * self.text_layers * self.width * (self.audio_positions + self.text_positions)


MULTILINGUAL_VOCAB = 51_865
"""Vocabularies of models that know English alone are smaller."""

_NAMES = {
    "mels": ("n_mels", "num_mel_bins"),
    "audio_positions": ("n_audio_ctx", "max_source_positions"),
    "width": ("n_audio_state", "d_model"),
    "audio_heads": ("n_audio_head", "encoder_attention_heads"),
    "audio_layers": ("n_audio_layer", "encoder_layers"),
    "text_positions": ("n_text_ctx", "max_target_positions"),
    "text_heads": ("n_text_head", "decoder_attention_heads"),
    "text_layers": ("n_text_layer", "decoder_layers"),
    "vocab": ("n_vocab", "vocab_size"),
}


def read_whisper(folder: Path) -> WhisperShape:
    """Raises `ModelError` if a size is missing or no whole number."""
    path = folder / "config.json"
    config = read_object(path)
    sizes = {name: _size(path, config, keys) for name, keys in _NAMES.items()}
    for heads in ("audio_heads", "text_heads"):
        if sizes["width"] % sizes[heads]:
            raise ModelError(f"{path}: {sizes['width']} values per position cannot be split over {sizes[heads]} heads")
    generation = read_optional_object(folder / "generation_config.json")
    multilingual = generation.get("is_multilingual")
    return WhisperShape(
        **sizes,
        multilingual=multilingual if isinstance(multilingual, bool) else sizes["vocab"] >= MULTILINGUAL_VOCAB,
        alignment_heads=_heads(generation, sizes),
        suppressed=_tokens(generation.get("suppress_tokens", config.get("suppress_tokens")), sizes["vocab"]),
        suppressed_first=_tokens(
            generation.get("begin_suppress_tokens", config.get("begin_suppress_tokens")), sizes["vocab"]
        ),
    )


def _size(path: Path, config: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    found = next((config[key] for key in keys if key in config), None)
    if type(found) is not int or found < 1:
        raise ModelError(f"{path}: {' or '.join(keys)} must be a whole number above 0, but is {found!r:.40}")
    return found


def _heads(generation: Mapping[str, Any], sizes: Mapping[str, int]) -> tuple[tuple[int, int], ...]:
    listed = generation.get("alignment_heads")
    if not isinstance(listed, list):
        return ()
    heads = [tuple(each) for each in listed if isinstance(each, list) and len(each) == 2]
    return tuple(
        (layer, head)
        for layer, head in heads
        if type(layer) is int and type(head) is int
        if 0 <= layer < sizes["text_layers"] and 0 <= head < sizes["text_heads"]
    )


def _tokens(listed: object, vocab: int) -> tuple[int, ...] | None:
    """None if there is no list. -1 stands for a list that is not given."""
    if not isinstance(listed, list) or -1 in listed:
        return None
    return tuple(each for each in listed if type(each) is int and 0 <= each < vocab)
