"""Opens a sound that nobody has looked at yet: as one channel, at the rate that a model hears."""

from __future__ import annotations

import math

import numpy as np

from millstream.errors import MediaRefused
from millstream.media.limits import MediaLimits
from millstream.media.sound_file import coded, decode_sound
from millstream.media.wav import Samples, open_wav

FADE = 0.05
"""The share of the band, at its upper end, that is turned down: a band that ends at once would ring for long."""
QUIET = 0.05
"""Seconds of silence behind a sound while it is resampled. What rings at its ends falls there, and not into it."""


def open_sound(data: bytes, limits: MediaLimits, *, rate: int, most: float) -> Samples:
    """`rate`: samples a second that the model takes. `most`: seconds that it takes. Raises `MediaRefused`."""
    longest = min(limits.sound, most)
    if (container := coded(data)) is not None:
        samples = decode_sound(data, container, limits, rate=rate, seconds=longest)
        _check(len(samples) / rate, limits, most, more=True)
        return samples
    wav = open_wav(data)
    _check(wav.seconds, limits, most)  # before any of it is decoded: a slow rate would become many samples
    return resampled(wav.mono(), wav.rate, rate)


def _check(seconds: float, limits: MediaLimits, most: float, *, more: bool = False) -> None:
    """`more`: it may be longer, since no more of it was decoded."""
    length = f"{'over ' if more else ''}{min(seconds, limits.sound, most) if more else seconds:.2f} s long"
    if seconds > limits.sound:
        raise MediaRefused(f"a sound is {length}; this server takes {limits.sound:g} s (--media-seconds)")
    if seconds > most:
        raise MediaRefused(f"a sound is {length}; this model hears {most:g} s at a time. Send it in several parts")


def resampled(samples: Samples, rate: int, wanted: int) -> Samples:
    """The same sound with `wanted` samples a second in place of `rate`. Its spectrum is cut, or has nothing added, so
    that no tone becomes another one."""
    if rate == wanted:
        return samples
    shared = math.gcd(rate, wanted)
    before, after = rate // shared, wanted // shared
    # A whole number of spans in which both have whole numbers of samples.
    spans = math.ceil((len(samples) + QUIET * rate) / before)
    spectrum = np.fft.rfft(samples.astype(np.float64), n=spans * before)[: spans * min(before, after) // 2 + 1]
    edge = np.linspace(0, 1 / FADE, len(spectrum)) - (1 / FADE - 1)
    spectrum *= 0.5 + 0.5 * np.cos(np.pi * np.maximum(edge, 0))
    made = np.fft.irfft(spectrum, n=spans * after)[: math.ceil(len(samples) * after / before)]
    return (made * (after / before)).astype(np.float32)
