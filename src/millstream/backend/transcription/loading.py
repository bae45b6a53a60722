"""Chooses the family of a transcription model and has it loaded. Owner only."""

from __future__ import annotations

from millstream.backend.device import Device
from millstream.backend.transcription.family import SteppingFamily
from millstream.backend.transcription.settings import TranscriptionSettings
from millstream.backend.weights.failures import LIBRARY_FAILURES
from millstream.engine.protocols import Progress
from millstream.errors import ModelError
from millstream.installed import missing_package
from millstream.models.transcription_layout import LIBRARY_FAMILIES, family_of


def load_family(settings: TranscriptionSettings, device: Device, report: Progress) -> SteppingFamily:
    """Raises `ModelError`. A `WholeFamily` is wrapped in `WholeWindows`."""
    family = family_of(settings.path)
    try:
        if family == "whisper":
            from millstream.backend.transcription.whisper.loading import load_whisper

            return load_whisper(settings, device, report)
        if family in LIBRARY_FAMILIES:
            from millstream.backend.transcription.library_families import load_library_family

            return load_library_family(family, settings, device, report)
    except ModuleNotFoundError as error:
        raise missing_package(f"{settings.path}: {family} models", error) from error
    except LIBRARY_FAILURES as error:
        raise ModelError(f"{settings.path}: {error}") from error
    raise ModelError(f"{settings.path}: transcription models of the family {family!r} are not supported")
