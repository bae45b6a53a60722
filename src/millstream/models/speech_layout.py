"""What a folder says about a speech model: its family, its weights and its voices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream.errors import ModelError
from millstream.models.files import check_file, read_object
from millstream.models.kokoro_config import is_kokoro, torch_weights
from millstream.models.safetensors_header import StoredTensor, folder_tensors, read_header

FAMILIES: dict[str, str] = {"kokoro": "kokoro", "pocket_tts": "pocket_tts", "qwen3_tts": "qwen3_tts"}
"""Values of `model_type` in config.json, and the family that speaks for them."""
LIBRARY_FAMILIES = frozenset({"pocket_tts", "qwen3_tts"})
"""Those that need mlx-audio."""
TOKENIZED_FAMILIES = frozenset({"qwen3_tts"})
"""Those whose backend is handed the folder's tokenizer."""
CODEC = "speech_tokenizer"
"""The folder of Qwen3-TTS's codec, which turns what the model writes into sound."""
VOICE_SUFFIXES = (".safetensors", ".pt")
MAX_VOICE_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class SpeechLayout:
    family: str
    voices: tuple[tuple[str, Path], ...] = ()
    """Names and files, where a family keeps its voices in files."""


def speech_family(config: Mapping[str, Any]) -> str | None:
    """The family of a speech model; None if it is a model of another kind."""
    if is_kokoro(config):
        return "kokoro"
    if isinstance(config.get("flow_lm"), dict) and isinstance(config.get("mimi"), dict):
        return "pocket_tts"
    return FAMILIES.get(str(config.get("model_type", "")).lower())


def read_speech_layout(folder: Path) -> SpeechLayout:
    """Raises `ModelError` if it is no speech model, or has no voices although its family needs them."""
    family = speech_family(read_object(folder / "config.json"))
    if family is None:
        raise ModelError(f"{folder}: is not a speech model. Supported: {', '.join(sorted(set(FAMILIES.values())))}.")
    if family == "pocket_tts":
        return SpeechLayout(family, _pocket_voices(folder))
    if family != "kokoro":
        return SpeechLayout(family)
    voices = voice_files(folder)
    if not voices:
        raise ModelError(f"{folder}: has no voices. It needs files such as voices/af_heart.safetensors or .pt.")
    return SpeechLayout(family, voices)


def voice_files(folder: Path) -> tuple[tuple[str, Path], ...]:
    """The voices in the folder `voices`, by name. Of two files of one voice, the safetensors file."""
    found: dict[str, Path] = {}
    for suffix in VOICE_SUFFIXES:
        for path in sorted((folder / "voices").glob(f"*{suffix}")):
            if check_file(path) > MAX_VOICE_BYTES:
                raise ModelError(f"{path}: is too large for a voice")
            if suffix == ".safetensors":
                read_header(path)
            found.setdefault(path.stem, path)
    return tuple(sorted(found.items()))


def _pocket_voices(folder: Path) -> tuple[tuple[str, Path], ...]:
    """Pocket TTS is published with its voices in one of two folders, and with one of them as the default."""
    found: dict[str, Path] = {}
    for path in (*folder.glob("voices/*.safetensors"), *folder.glob("embeddings/*.safetensors")):
        found.setdefault(path.stem.lower(), path)
    if (default := folder / "default-voice.safetensors").exists():
        found.setdefault("default", default)
    for path in found.values():
        if check_file(path) > MAX_VOICE_BYTES:
            raise ModelError(f"{path}: is too large for a voice")
        read_header(path)
    if not found:
        raise ModelError(f"{folder}: has no voices. It needs files such as voices/alba.safetensors.")
    return tuple(sorted(found.items()))


def speaker_names(folder: Path, layout: SpeechLayout) -> tuple[str, ...]:
    """The voices that a request may name. Qwen3-TTS has them in its configuration."""
    if layout.family != "qwen3_tts":
        return tuple(name for name, _ in layout.voices)
    talker = read_object(folder / "config.json").get("talker_config")
    speakers = talker.get("spk_id") if isinstance(talker, dict) else None
    return tuple(speakers) if isinstance(speakers, dict) else ()


def speech_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of the weights by name. Raises `ModelError` for a file that must not be opened."""
    path = torch_weights(folder)
    if path is not None:
        from millstream.models.torch_file import TorchFile  # NumPy is slow to import

        return TorchFile(path).stored
    tensors = folder_tensors(folder)
    if (folder / CODEC / "config.json").is_file():
        tensors |= {f"{CODEC}.{name}": tensor for name, tensor in folder_tensors(folder / CODEC).items()}
    return tensors
