"""Loads the speaker of a family. Owner only."""

from __future__ import annotations

from collections.abc import Callable

from millstream.backend.device import Device
from millstream.backend.speech.settings import SpeechSettings
from millstream.backend.speech.speaker import Speaker
from millstream.backend.weights.failures import LIBRARY_FAILURES
from millstream.backend.weights.materialize import evaluate_all
from millstream.engine.protocols import Progress, ignore_progress
from millstream.errors import ModelError
from millstream.installed import missing_package, require_mlx_audio
from millstream.models.speech_layout import LIBRARY_FAMILIES

Load = Callable[[SpeechSettings, Device], Speaker]


def load_speaker(settings: SpeechSettings, device: Device, report: Progress = ignore_progress) -> Speaker:
    """Loads and evaluates all weights. Raises `ModelError` if the files cannot be used."""
    try:
        speaker = _family(settings.layout.family)(settings, device)
    except ModuleNotFoundError as error:
        raise missing_package(f"{settings.path}: {settings.layout.family} models", error) from error
    except LIBRARY_FAILURES as error:
        raise ModelError(f"{settings.path}: {error}") from error
    evaluate_all(speaker.weights, report)
    return speaker


def _family(name: str) -> Load:
    """Imports one family only: some need libraries that take seconds to import."""
    if name == "kokoro":
        from millstream.backend.speech.kokoro.speaker import load_kokoro

        return load_kokoro
    if name in LIBRARY_FAMILIES:
        require_mlx_audio(f"{name} models")
    if name == "pocket_tts":
        from millstream.backend.speech.pocket_tts import load_pocket_tts

        return load_pocket_tts
    if name == "qwen3_tts":
        from millstream.backend.speech.qwen3_tts import load_qwen3_tts

        return load_qwen3_tts
    raise ModelError(f"the speech family {name!r} is not supported")
