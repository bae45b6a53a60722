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

FAMILIES: dict[str, str] = {"kokoro": "kokoro"}
"""Values of `model_type` in config.json, and the family that speaks for them."""
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
    return FAMILIES.get(str(config.get("model_type", "")).lower())


def read_speech_layout(folder: Path) -> SpeechLayout:
    """Raises `ModelError` if it is no speech model, or has no voices although its family needs them."""
    family = speech_family(read_object(folder / "config.json"))
    if family is None:
        raise ModelError(f"{folder}: is not a speech model. Supported: {', '.join(sorted(set(FAMILIES.values())))}.")
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


def speech_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of the weights by name. Raises `ModelError` for a file that must not be opened."""
    path = torch_weights(folder)
    if path is not None:
        from millstream.models.torch_file import TorchFile  # NumPy is slow to import

        return TorchFile(path).stored
    return folder_tensors(folder)
