"""A text as a speech model reads it: pieces that are spoken at once, each as phonemes or as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Line:
    """What is spoken at once: a sentence, or a part of a long one."""

    tokens: tuple[int, ...] = ()
    """For models that read phonemes."""
    text: str = ""
    """For models that read text."""

    @property
    def size(self) -> int:
        """Phonemes, or characters for models that read text: what is counted as usage."""
        return len(self.tokens) or len(self.text)


@dataclass(frozen=True, slots=True)
class Script:
    lines: Iterator[Line]
    """Each is prepared when it is asked for, on the pool: a long text begins to sound before all of it is."""
    voice: tuple[tuple[str, float], ...] = ()
    """Names of voices, each with its share. Empty: the model's own."""
    language: str | None = None


class ScriptWriter(Protocol):
    """Prepares texts for one model. Called on the pool."""

    def write(self, text: str, *, voice: str | None, language: str | None) -> Script:
        """Raises `BadRequest` for a voice or a language that there is not."""
        ...
