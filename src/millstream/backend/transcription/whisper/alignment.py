"""The times of words, from how the decoder's cross attention moves over the audio.

Some heads look at the audio that is being written down. Their weights, smoothed, give a matrix of tokens and positions;
the cheapest monotonic path through it (dynamic time warping) says when each token was spoken.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from millstream.backend.transcription.settings import Vocabulary

POSITIONS_PER_SECOND = 50
SMOOTHING = 7
"""Positions over which the weights are smoothed by their median."""
_NO_SPACES = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
"""Languages that write without spaces: each character is a word."""
_BEFORE = frozenset("\"'“¿([{-")
"""Punctuation that belongs to the word after it."""
_AFTER = frozenset("\"'.。,，!！?？:：”)]}、")

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class AlignedWord:
    text: str
    tokens: int
    """How many it has."""
    start: float
    end: float
    probability: float


def alignment(matches: Sequence[mx.array], positions: int) -> mx.array:
    """Of each head's (1, tokens, positions) before the softmax: the mean of the smoothed weights. Owner only."""
    weights = mx.softmax(mx.concatenate(list(matches))[:, :, :positions], axis=-1)
    mean = weights.mean(axis=1, keepdims=True)
    spread = mx.sqrt(mx.maximum(weights.var(axis=1, keepdims=True), 1e-20))
    return _median((weights - mean) / spread).mean(axis=0)


def _median(values: mx.array) -> mx.array:
    """The median of `SMOOTHING` neighbours on the last axis: by swaps, which every device does fast."""
    side, length = SMOOTHING // 2, values.shape[-1]
    if length <= side:
        return values
    front, back = values[..., side:0:-1], values[..., -2 : -side - 2 : -1]
    padded = mx.concatenate([front, values, back], axis=-1)
    shifted = [padded[..., place : place + length] for place in range(SMOOTHING)]
    for first in range(side + 1):
        for second in range(first + 1, SMOOTHING):
            low = mx.minimum(shifted[first], shifted[second])
            shifted[second] = mx.maximum(shifted[first], shifted[second])
            shifted[first] = low
    return shifted[side]


def warp(costs: Floats) -> npt.NDArray[np.int64]:
    """The position at which each row of (tokens, positions) begins, on the cheapest path from corner to corner."""
    rows, columns = costs.shape
    total = np.full((rows + 1, columns + 1), np.inf)
    total[0, 0] = 0.0
    moves = np.zeros((rows + 1, columns + 1), np.int8)
    for diagonal in range(2, rows + columns + 1):
        row = np.arange(max(1, diagonal - columns), min(rows, diagonal - 1) + 1)
        column = diagonal - row
        options = np.stack([total[row - 1, column - 1], total[row - 1, column], total[row, column - 1]])
        # On a tie, stay in the token.
        best = np.where(
            (options[0] < options[1]) & (options[0] < options[2]), 0, np.where(options[1] < options[2], 1, 2)
        )
        moves[row, column] = best
        total[row, column] = costs[row - 1, column - 1] + np.take_along_axis(options, best[None], axis=0)[0]
    begins = np.zeros(rows, np.int64)
    row_at, column_at = rows, columns
    while row_at > 0 and column_at > 0:
        begins[row_at - 1] = column_at - 1
        move = moves[row_at, column_at]
        row_at -= move != 2
        column_at -= move != 1
    return begins


def split_words(tokens: Sequence[int], vocabulary: Vocabulary, language: str | None) -> list[tuple[str, int]]:
    """The words of a text, each with its number of tokens."""
    pieces = _characters(tokens, vocabulary)
    if language in _NO_SPACES:
        return pieces
    words: list[tuple[str, int]] = []
    for text, count in pieces:
        joins = words and not text.startswith(" ") and text.strip() not in string.punctuation
        if joins:
            before, already = words.pop()
            words.append((before + text, already + count))
        else:
            words.append((text, count))
    return words


def _characters(tokens: Sequence[int], vocabulary: Vocabulary) -> list[tuple[str, int]]:
    """Joins tokens that hold parts of one character."""
    pieces: list[tuple[str, int]] = []
    begin = 0
    for end in range(1, len(tokens) + 1):
        text = vocabulary.decode(tokens[begin:end])
        if "\ufffd" not in text or end - begin >= 4 or end == len(tokens):
            pieces.append((text, end - begin))
            begin = end
    return pieces


def aligned_words(words: Sequence[tuple[str, int]], begins: Floats, logprobs: Sequence[float]) -> list[AlignedWord]:
    """`begins`: of each token and of the end, in seconds. `logprobs`: of each token."""
    found: list[AlignedWord] = []
    place = 0
    for text, count in words:
        probability = float(np.exp(np.asarray(logprobs[place : place + count])).mean())
        start, end = float(begins[place]), float(begins[place + count])
        found.append(AlignedWord(text, count, start, end, probability))
        place += count
    return _join_punctuation(found)


def _join_punctuation(words: Sequence[AlignedWord]) -> list[AlignedWord]:
    """Punctuation takes no time: it belongs to the word beside it."""
    joined: list[AlignedWord] = []
    for word in words:
        mark = word.text.strip()
        last = joined[-1] if joined else None
        if last is not None and mark and set(mark) <= _AFTER and not word.text.startswith(" "):
            joined[-1] = AlignedWord(
                last.text + word.text, last.tokens + word.tokens, last.start, last.end, last.probability
            )
        elif last is not None and last.text.startswith(" ") and last.text.strip() and set(last.text.strip()) <= _BEFORE:
            joined[-1] = AlignedWord(
                last.text + word.text, last.tokens + word.tokens, word.start, word.end, word.probability
            )
        else:
            joined.append(word)
    return joined
