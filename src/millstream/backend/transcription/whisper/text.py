"""Turns a row's tokens into segments, and judges whether a text looks right. No MLX."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from millstream.backend.transcription.whisper.tokens import TIME_STEP

MAX_COMPRESSION = 2.4
"""Text that zlib makes smaller than by this factor repeats itself."""
MIN_LOGPROB = -1.0
MAX_NO_SPEECH = 0.6


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens between two timestamps, in seconds from the begin of the window."""

    start: float
    end: float
    tokens: tuple[int, ...]
    """Of the text alone."""


def stretches(tokens: Sequence[int], zero: int, end: int, seconds: float) -> tuple[list[Stretch], float | None]:
    """The stretches of a window of so many seconds, and how far they reach if the model has begun one that it did not
    end: the rest of the window must be heard again. `zero`: the first timestamp token. `end`: the first control token.
    """
    cuts = [place for place in range(1, len(tokens)) if tokens[place - 1] >= zero and tokens[place] >= zero]
    closed = len(tokens) >= 2 and tokens[-1] >= zero > tokens[-2]
    if not cuts:
        last = next((token for token in reversed(tokens) if token > zero), None)
        first = tokens[0] if tokens and tokens[0] >= zero else zero
        whole = _stretch([first, *tokens, last or first], zero, end, seconds)
        if last is None or whole.end <= whole.start:
            whole = Stretch(whole.start, round(seconds, 2), whole.tokens)
        return ([whole] if whole.tokens else []), None
    begins = [0, *cuts]
    ends = [*cuts, len(tokens)] if closed else cuts
    found = [_stretch(tokens[a:b], zero, end, seconds) for a, b in zip(begins, ends, strict=False)]
    reached = None if closed else (tokens[cuts[-1] - 1] - zero) * TIME_STEP
    if reached is not None and not 0 < reached < seconds:
        reached = None
    return [each for each in found if each.tokens], reached


def _stretch(tokens: Sequence[int], zero: int, end: int, seconds: float) -> Stretch:
    times = [min(max(0, token - zero) * TIME_STEP, seconds) for token in (tokens[0], tokens[-1])]
    return Stretch(round(times[0], 2), round(times[1], 2), tuple(token for token in tokens if token < end))


@dataclass(frozen=True, slots=True)
class Attempt:
    """A text as one temperature gave it."""

    tokens: tuple[int, ...]
    text: str
    logprob: float
    """The mean per token."""
    temperature: float
    no_speech: float

    @property
    def compression(self) -> float:
        data = self.text.encode()
        return len(data) / len(zlib.compress(data)) if data else 1.0

    @property
    def is_silence(self) -> bool:
        return self.no_speech > MAX_NO_SPEECH and self.logprob < MIN_LOGPROB

    @property
    def looks_wrong(self) -> bool:
        """It repeats itself or is a guess. Silence is neither."""
        return not self.is_silence and (self.compression > MAX_COMPRESSION or self.logprob < MIN_LOGPROB)


def best_attempt(attempts: Sequence[Attempt]) -> Attempt:
    """The last one if it looks right. Else the likeliest that does not repeat itself, or the one that does so least."""
    if not attempts[-1].looks_wrong:
        return attempts[-1]
    varied = [attempt for attempt in attempts if attempt.compression <= MAX_COMPRESSION]
    if varied:
        return max(varied, key=lambda attempt: attempt.logprob)
    return min(attempts, key=lambda attempt: attempt.compression)
