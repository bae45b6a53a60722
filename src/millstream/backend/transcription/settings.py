"""What the backend of a transcription model is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class Vocabulary(Protocol):
    """A model's tokenizer. The backend does not import one: it is handed over by whoever makes the backend."""

    def encode(self, text: str) -> list[int]:
        """Without special tokens."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Bytes that are no UTF-8 become replacement characters. Special tokens are skipped."""
        ...

    def token(self, name: str) -> int | None:
        """The id of a special token, or None if there is none of that name."""
        ...


@dataclass(frozen=True, slots=True)
class TranscriptionSettings:
    path: Path
    """The model's folder."""
    vocabulary: Vocabulary | None = None
    """None for families that bring their own."""
    capacity: int = 32
    """Client requests at the same time."""
    max_rows: int | None = None
    """Windows at the same time, if the memory that was granted is for fewer than the family would take."""
    disabled: frozenset[str] = frozenset()
    blas: str | None = None
    cache_limit: int | None = None
