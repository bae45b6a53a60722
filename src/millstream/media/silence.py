"""Cuts audio into windows for transcription: at silences, none too long, and nothing without speech.

Which stretches have speech is decided by `voice`. It errs towards speech: a transcription model can still find that
a window says nothing, but it never gets what is left out here.
"""

from __future__ import annotations

import numpy as np

from millstream.media.voice import HOP_SECONDS, PhraseDetector, band_levels
from millstream.speech_types import Samples

LONGEST_GAP = 5.0
"""Seconds of silence that a window may hold between two phrases: a longer one begins a new window."""
SEARCH = 0.5
"""Speech without a pause is cut at the quietest place in this last part of the longest window."""
CALM_FRAMES = 7
"""Frames over which "quietest" is measured: about the length of a stop between two words."""


def speech(samples: Samples, rate: int) -> list[tuple[int, int]]:
    """The stretches with speech, as begin and end in samples: in order, apart from each other, with some silence
    around each."""
    detector = PhraseDetector(rate)
    detector.learn_floor(samples)
    edges = [*detector.feed(samples), *detector.end()]
    return [(begin.position, end.position) for begin, end in zip(edges[::2], edges[1::2], strict=True)]


def has_speech(samples: Samples, rate: int) -> bool:
    return bool(speech(samples, rate))


def cut(samples: Samples, rate: int, longest: float) -> list[tuple[int, int]]:
    """Windows of at most `longest` seconds, as begin and end in samples, in order. Each sample with speech is in
    exactly one of them. Phrases share a window while they fit and the pauses between them are short."""
    most = int(longest * rate)
    if most <= 0:
        raise ValueError(f"windows of {longest:g} s at {rate} samples per second have no samples")
    windows: list[tuple[int, int]] = []
    for begin, end in _split(samples, rate, most):
        if windows:
            first, last = windows[-1]
            if end - first <= most and begin - last <= LONGEST_GAP * rate:
                windows[-1] = (first, end)
                continue
        windows.append((begin, end))
    return windows


def _split(samples: Samples, rate: int, most: int) -> list[tuple[int, int]]:
    """The stretches with speech, those that are too long in pieces."""
    pieces = []
    for begin, end in speech(samples, rate):
        while end - begin > most:
            middle = begin + _quietest(samples[begin : begin + most], rate)
            pieces.append((begin, middle))
            begin = middle
        pieces.append((begin, end))
    return pieces


def _quietest(samples: Samples, rate: int) -> int:
    """Where to cut a stretch of speech, in samples, from `SEARCH` of its length to its end."""
    first = int(len(samples) * (1 - SEARCH))
    levels = band_levels(samples[first:], rate).mean(axis=1)
    if len(levels) < CALM_FRAMES:
        return len(samples)
    calm = np.convolve(levels, np.full(CALM_FRAMES, 1 / CALM_FRAMES), "valid")
    frame = int(calm.argmin()) + CALM_FRAMES // 2 + 1
    return first + min(int(frame * HOP_SECONDS * rate), len(samples) - first)
