"""The settings of an encoder's backend."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from millstream.models.encoder_layout import EncoderLayout


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    path: Path
    layout: EncoderLayout
    pad_token: int = 0
    answers: tuple[int, int] | None = None
    """Of a language model that is a reranker: its tokens for no and yes."""
    capacity: int = 32
    unpack: bool = True
    disabled: frozenset[str] = frozenset()
    blas: str | None = None
    """The BLAS that was loaded, for the log."""
    cache_limit: int | None = None
