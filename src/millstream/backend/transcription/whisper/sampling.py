"""Chooses the next token of every row, within Whisper's rules for timestamps. Owner only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from millstream.backend.transcription.whisper.arithmetic import Arithmetic
from millstream.backend.transcription.whisper.tokens import Allowed, SpecialTokens

_NEVER = -np.inf


@dataclass(frozen=True, slots=True)
class Draw:
    """How a row is sampled. Greedily if the temperature is 0."""

    temperature: float = 0.0
    seed: int = 0
    position: int = 0


class Sampler:
    def __init__(
        self,
        vocab: int,
        special: SpecialTokens,
        suppressed: set[int],
        suppressed_first: set[int],
        arithmetic: Arithmetic,
    ) -> None:
        self._arithmetic = arithmetic
        zero = self._zero = special.first_time
        self._text_bias = mx.array(_bias(zero, suppressed))
        self._first_bias = mx.array(_bias(zero, suppressed | suppressed_first))
        self._is_end = mx.array(np.arange(zero) == special.end)
        self._times = mx.arange(vocab - zero)
        mx.eval(self._text_bias, self._first_bias, self._is_end, self._times)

    def __call__(
        self, logits: mx.array, allowed: Sequence[Allowed], draws: Sequence[Draw]
    ) -> tuple[mx.array, mx.array]:
        """The next token of each row of (rows, vocabulary), and its log probability among those that may come."""
        zero = self._zero
        text = self._text(logits[:, :zero], allowed)
        times = self._stamps(logits[:, zero:], allowed)
        best_text, text_mass = text.max(axis=-1), self._arithmetic.logsumexp(text)
        time_mass = mx.logsumexp(times, axis=-1)
        # A time comes next if all times together are likelier than any one piece of text.
        is_time = time_mass > best_text
        mass = mx.where(is_time, time_mass, mx.logaddexp(text_mass, time_mass))
        if any(draw.temperature > 0 for draw in draws):
            scale = mx.array([1 / draw.temperature if draw.temperature > 0 else 1.0 for draw in draws])[:, None]
            noise = mx.stack([_noise(draw, logits.shape[-1]) for draw in draws])
            drawn_text = text * scale + noise[:, :zero]
            drawn_times = times * scale + noise[:, zero:]
        else:
            drawn_text, drawn_times = text, times
        is_time = is_time | (drawn_times.max(axis=-1) > drawn_text.max(axis=-1))
        text_token, time_token = drawn_text.argmax(axis=-1), drawn_times.argmax(axis=-1)
        chosen = mx.where(
            is_time,
            mx.take_along_axis(times, time_token[:, None], axis=-1)[:, 0],
            mx.take_along_axis(text, text_token[:, None], axis=-1)[:, 0],
        )
        return mx.where(is_time, time_token + zero, text_token), chosen - mass

    def _text(self, logits: mx.array, allowed: Sequence[Allowed]) -> mx.array:
        if any(each.is_first for each in allowed):
            first = mx.array([each.is_first for each in allowed])[:, None]
            text = logits + mx.where(first, self._first_bias, self._text_bias)
        else:
            text = logits + self._text_bias
        if all(each.text and each.end for each in allowed):
            return text
        may_text = mx.array([each.text for each in allowed])[:, None]
        may_end = mx.array([each.end for each in allowed])[:, None]
        return mx.where(may_text | (may_end & self._is_end), text, _NEVER)

    def _stamps(self, logits: mx.array, allowed: Sequence[Allowed]) -> mx.array:
        first = mx.array([each.times[0] for each in allowed])[:, None]
        last = mx.array([each.times[1] for each in allowed])[:, None]
        return mx.where((self._times >= first) & (self._times <= last), logits, _NEVER)


def _bias(size: int, tokens: set[int]) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    bias = np.zeros(size, np.float32)
    bias[[token for token in tokens if token < size]] = _NEVER
    return bias


def _noise(draw: Draw, size: int) -> mx.array:
    """Gumbel noise that depends on seed and position alone, so that a row does not depend on its batch."""
    if draw.temperature <= 0:
        return mx.zeros(size)
    key = mx.random.key((draw.seed * 1_000_003 + draw.position) % 2**63)
    return mx.random.gumbel((size,), key=key)
