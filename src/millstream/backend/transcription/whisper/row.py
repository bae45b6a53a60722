"""A row: one window while it is written down. No MLX."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from millstream.backend.transcription.settings import Vocabulary
from millstream.backend.transcription.whisper.text import Attempt
from millstream.backend.transcription.whisper.tokens import TIME_STEP, SpecialTokens
from millstream.engine.transcription.messages import SAMPLE_BYTES, Options
from millstream.engine.transcription.plan import RowKey, WindowStart
from millstream.models.transcription_layout import WhisperShape
from millstream.speech_types import SPEECH_RATE


@dataclass(slots=True)
class Row:
    key: RowKey
    options: Options
    seconds: float
    """Of audio, without padding."""
    language: str | None
    prompt: list[int]
    """Tokens before the text: context, language, task."""
    limit: int
    """Most tokens of the text."""
    last_time: int
    """The timestamp at the end of the audio, counted from 0: what comes after it is padding."""
    slot: int = -1
    no_speech: float = 0.0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    attempt_logprobs: list[list[float]] = field(default_factory=list)

    @property
    def temperature(self) -> float:
        return self.options.temperatures[len(self.attempts)]

    @property
    def seed(self) -> int:
        """Differs between windows and between attempts."""
        return (self.options.seed * 8191 + self.key[1]) * 31 + len(self.attempts)

    @property
    def next_input(self) -> int:
        return self.tokens[-1] if self.tokens else self.prompt[-1]

    def end_attempt(self, vocabulary: Vocabulary, special: SpecialTokens) -> bool:
        """Books the text as it is. True if it looks wrong and a higher temperature is left to try."""
        text = vocabulary.decode([token for token in self.tokens if token < special.end])
        logprob = sum(self.logprobs) / (len(self.logprobs) or 1)
        tokens = tuple(self.tokens[:-1] if self.tokens and self.tokens[-1] == special.end else self.tokens)
        attempt = Attempt(tokens, text.strip(), logprob, self.temperature, self.no_speech)
        self.attempts.append(attempt)
        self.attempt_logprobs.append(self.logprobs)
        self.tokens, self.logprobs = [], []
        return attempt.looks_wrong and len(self.attempts) < len(self.options.temperatures)


def seconds_of(window: WindowStart) -> float:
    return len(window.samples) / SAMPLE_BYTES / SPEECH_RATE


def task_tokens(special: SpecialTokens, language: str | None, options: Options) -> list[int]:
    """What tells the model to begin. English-only models know one task."""
    if not special.languages:
        return [special.start]
    code = special.languages.get(language or "en", special.languages.get("en", special.start))
    return [special.start, code, special.translate if options.task == "translate" else special.transcribe]


def make_row(
    window: WindowStart, language: str | None, shape: WhisperShape, special: SpecialTokens, vocabulary: Vocabulary
) -> Row:
    task = task_tokens(special, language, window.options)
    before: list[int] = []
    if window.options.prompt.strip():
        most = shape.text_positions // 2 - 1
        before = [special.previous, *vocabulary.encode(f" {window.options.prompt.strip()}")[-most:]]
    prompt = [*before, *task]
    limit = min(shape.text_positions // 2, shape.text_positions - len(prompt))
    seconds = min(seconds_of(window), shape.window_seconds)
    return Row(window.key, window.options, seconds, language, prompt, limit, math.ceil(seconds / TIME_STEP))
