"""Checks what a request asks of a transcription model, and says what would be right."""

from __future__ import annotations

from millstream.engine.transcription.messages import Options
from millstream.errors import BadRequest
from millstream.model_facts import TranscriptionFacts
from millstream.speech_types import TranscriptionRequest
from millstream.types import LEAST_TEMPERATURE

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
MAX_PROMPT = 20_000
"""Characters. Of a longer prompt the end counts, which is all that a model reads."""


def options_of(request: TranscriptionRequest, name: str, facts: TranscriptionFacts) -> Options:
    """Raises `BadRequest` for what this model cannot do."""
    language = _language(request.language, name, facts)
    if request.task == "translate" and not facts.translates:
        raise BadRequest(f"{name!r} cannot translate: it writes down what it hears. Use a multilingual Whisper model.")
    if request.words and not facts.word_times:
        raise BadRequest(
            f"{name!r} gives no times of words. Leave out 'word', or use a model with `word_timestamps` in /v1/models.",
            param="timestamp_granularities",
        )
    asked = request.temperature or 0.0
    first = 0.0 if asked < LEAST_TEMPERATURE else asked
    return Options(
        task=request.task,
        language=language,
        prompt=(request.prompt or "")[-MAX_PROMPT:] if facts.takes_prompt else "",
        temperatures=(first, *(each for each in TEMPERATURES if each > first)),
        words=request.words,
        quick=request.quick,
    )


def _language(asked: str | None, name: str, facts: TranscriptionFacts) -> str | None:
    if not asked or not asked.strip():
        return None
    code = asked.strip().lower().replace("_", "-").partition("-")[0]
    if facts.languages and code not in facts.languages:
        known = ", ".join(sorted(facts.languages))
        raise BadRequest(
            f"{name!r} does not know the language {asked[:40]!r}. It knows: {known}. Leave it out to have it detected.",
            param="language",
        )
    return code
