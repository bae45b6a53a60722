"""Whisper's special tokens, and which of all tokens may come next. No MLX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millstream.backend.transcription.settings import Vocabulary
from millstream.backend.transcription.whisper.languages import LANGUAGES
from millstream.errors import ModelError
from millstream.models.transcription_layout import WhisperShape

TIME_STEP = 0.02
"""Seconds from one timestamp token to the next."""
MAX_FIRST_TIME = 1.0
"""A text begins within so many seconds: silence before it was cut off."""

_SYMBOLS = (
    *"\"#()*+/:;<=>@[\\]^_`{|}~「」『』",
    "<<", ">>", "<<<", ">>>", "--", "---", "-(", "-[", "('", '("', "((", "))", "(((", ")))", "[[", "]]", "{{", "}}",
    "♪♪", "♪♪♪",
)  # fmt: skip
_NOTES = tuple("♩♪♫♬♭♮♯")
"""What describes sounds instead of words."""


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    end: int
    start: int
    translate: int
    transcribe: int
    previous: int
    no_speech: int
    no_timestamps: int
    languages: dict[str, int]
    """By code. Empty for a model that knows English alone."""

    @property
    def first_time(self) -> int:
        return self.no_timestamps + 1

    @classmethod
    def of(cls, shape: WhisperShape, vocabulary: Vocabulary) -> SpecialTokens:
        def named(*names: str) -> int:
            for name in names:
                if (token := vocabulary.token(name)) is not None:
                    return token
            raise ModelError(f"its tokenizer has no token {names[0]!r}, so it is none of Whisper's")

        found = {code: vocabulary.token(f"<|{code}|>") for code in LANGUAGES} if shape.multilingual else {}
        tokens = cls(
            end=named("<|endoftext|>"),
            start=named("<|startoftranscript|>"),
            translate=named("<|translate|>"),
            transcribe=named("<|transcribe|>"),
            previous=named("<|startofprev|>"),
            no_speech=named("<|nospeech|>", "<|nocaptions|>"),
            no_timestamps=named("<|notimestamps|>"),
            languages={code: token for code, token in found.items() if token is not None},
        )
        last = tokens.first_time + round(shape.window_seconds / TIME_STEP)
        if last >= shape.vocab:
            raise ModelError(f"its tokenizer needs {last + 1} tokens, but config.json has {shape.vocab}")
        return tokens

    def suppressed(self, shape: WhisperShape, vocabulary: Vocabulary) -> set[int]:
        """Tokens that no text has: control tokens, and symbols that describe sounds."""
        control = set(range(self.end + 1, self.first_time))
        return control | set(shape.suppressed if shape.suppressed is not None else _sound_symbols(vocabulary))

    def suppressed_first(self, shape: WhisperShape, vocabulary: Vocabulary) -> set[int]:
        """Tokens that no text begins with: a blank, and the end."""
        return set(shape.suppressed_first or vocabulary.encode(" ")) | {self.end}


def _sound_symbols(vocabulary: Vocabulary) -> set[int]:
    found = {vocabulary.encode(seed)[0] for seed in (" -", " '") if vocabulary.encode(seed)}
    for symbol in (*_SYMBOLS, *_NOTES):
        for tokens in (vocabulary.encode(symbol), vocabulary.encode(f" {symbol}")):
            if tokens and (len(tokens) == 1 or symbol in _NOTES):
                found.add(tokens[0])
    return found


@dataclass(frozen=True, slots=True)
class Allowed:
    """Which tokens may come next, besides those that never may."""

    text: bool
    """Tokens of text."""
    end: bool
    times: tuple[int, int]
    """The first and the last timestamp that may, counted from 0. None if the last one is below the first."""
    is_first: bool


def allowed_next(tokens: Sequence[int], special: SpecialTokens, last_time: int) -> Allowed:
    """Timestamps come in pairs, around the text between them, and never go back. A text begins with one."""
    zero = special.first_time
    if not tokens:
        return Allowed(False, False, (0, min(last_time, round(MAX_FIRST_TIME / TIME_STEP))), True)
    after_time = tokens[-1] >= zero
    opens = after_time and (len(tokens) < 2 or tokens[-2] >= zero)
    if opens:
        return Allowed(True, True, (0, -1), False)
    latest = next((token - zero for token in reversed(tokens) if token >= zero), 0)
    # The end of a stretch of text is also where the next one may begin; but a stretch is not empty.
    return Allowed(not after_time, True, (latest if after_time else latest + 1, last_time), False)
