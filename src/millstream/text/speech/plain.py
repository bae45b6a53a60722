"""Prepares texts for speech models that read text: sentences, one line each."""

from __future__ import annotations

from collections.abc import Collection

from millstream.errors import BadRequest
from millstream.models.kokoro_voices import OPENAI_VOICES
from millstream.text.speech.script import Line, Script
from millstream.text.speech.sentences import pieces


class PlainWriter:
    """Implements `script.ScriptWriter` for models with these voices. None of them: the model has one without a name."""

    def __init__(self, voices: Collection[str]) -> None:
        self._voices = tuple(voices)

    def write(self, text: str, *, voice: str | None, language: str | None) -> Script:
        if not _has_words(text):
            raise BadRequest("nothing in the text can be spoken: it has no words, numbers or letters", param="input")
        name = self._known(voice) if voice else None
        lines = (Line(text=piece) for piece in pieces(text) if _has_words(piece))
        return Script(lines, ((name, 1.0),) if name else (), language)

    def _known(self, voice: str) -> str | None:
        """None, the model's default, for a name of OpenAI's that it does not have: its clients must send one."""
        found = next((name for name in self._voices if name.lower() == voice.lower()), None)
        if found is None and voice.lower() not in OPENAI_VOICES:
            known = f"Its voices: {', '.join(self._voices)}." if self._voices else "It has no voices to choose from."
            raise BadRequest(f"the model has no voice {voice!r:.80}. {known}", param="voice")
        return found


def _has_words(text: str) -> bool:
    return any(character.isalnum() for character in text)
