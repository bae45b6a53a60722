"""A text as a speech model reads it: pieces that are spoken at once, each as phonemes or as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Line:
    """What is spoken at once: a sentence, or a part of a long one."""

    tokens: tuple[int, ...] = ()
    """For models that read phonemes."""
    text: str = ""
    """For models that read text."""


@dataclass(frozen=True, slots=True)
class Script:
    lines: tuple[Line, ...]
    voice: tuple[tuple[str, float], ...] = ()
    """Names of voices, each with its share. Empty: the model's own."""
    language: str | None = None
    tokens: int = 0
    """Phonemes, or characters for models that read text: what is counted as usage."""


class ScriptWriter(Protocol):
    """Prepares texts for one model. Called on the pool."""

    def write(self, text: str, *, voice: str | None, language: str | None) -> Script:
        """Raises `BadRequest` if nothing of the text can be spoken, or for a voice or language that there is not."""
        ...
