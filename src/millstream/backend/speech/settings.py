"""The settings of a speech model's backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from millstream.models.speech_layout import SpeechLayout


@dataclass(frozen=True, slots=True)
class SpeechSettings:
    path: Path
    layout: SpeechLayout
    encode: Callable[[str], Sequence[int]] | None = None
    """From text, with control tokens, to tokens: for models that read text and do not bring their own tokenizer."""
    capacity: int = 32
    disabled: frozenset[str] = frozenset()
    blas: str | None = None
    """The BLAS that was loaded, for the log."""
    cache_limit: int | None = None
