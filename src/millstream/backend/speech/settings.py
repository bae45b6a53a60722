"""The settings of a speech model's backend."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from millstream.models.speech_layout import SpeechLayout


@dataclass(frozen=True, slots=True)
class SpeechSettings:
    path: Path
    layout: SpeechLayout
    capacity: int = 32
    disabled: frozenset[str] = frozenset()
    blas: str | None = None
    """The BLAS that was loaded, for the log."""
    cache_limit: int | None = None
