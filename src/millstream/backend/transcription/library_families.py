"""Chooses among the families that run on mlx-audio's modules. Owner only."""

from __future__ import annotations

from millstream.backend.device import Device
from millstream.backend.transcription.family import SteppingFamily
from millstream.backend.transcription.moonshine import load_moonshine
from millstream.backend.transcription.parakeet.family import load_parakeet
from millstream.backend.transcription.qwen3_asr import load_qwen3_asr
from millstream.backend.transcription.settings import TranscriptionSettings
from millstream.backend.transcription.voxtral import load_voxtral
from millstream.engine.protocols import Progress
from millstream.errors import ModelError
from millstream.installed import require_mlx_audio
from millstream.models.checks import check_folder

_WITH_VOCABULARY = {"moonshine": load_moonshine, "qwen3_asr": load_qwen3_asr, "voxtral": load_voxtral}


def load_library_family(
    family: str, settings: TranscriptionSettings, device: Device, report: Progress
) -> SteppingFamily:
    require_mlx_audio(f"{settings.path}: {family} models")
    config = check_folder(settings.path)
    if family == "parakeet":
        return load_parakeet(settings.path, config, device, report)
    if settings.vocabulary is None:
        raise ModelError(f"{settings.path}: has no tokenizer")
    return _WITH_VOCABULARY[family](settings.path, config, settings.vocabulary, device, report)
