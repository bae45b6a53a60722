"""Opens a sound that nobody has looked at yet: as one channel, at the rate that a model hears."""

from __future__ import annotations

import math

import numpy as np

from millstream.errors import MediaRefused
from millstream.media.audio_file import coded, decode_sound
from millstream.media.limits import MediaLimits
from millstream.media.wav import Samples, open_wav

FADE = 0.05
"""The share of the band, at its upper end, that is turned down: a band that ends at once would ring for long."""
SAMPLE_BYTES = 40
"""Memory for each sample while a sound is resampled: doubles, and their spectrum."""
FASTEST_MODEL = 16_000
"""Samples a second: no model that is served hears more."""
QUIET = 0.05
"""Seconds of silence behind a sound while it is resampled. What rings at its ends falls there, and not into it."""


def open_sound(data: bytes, limits: MediaLimits, *, rate: int, most: float) -> Samples:
    """`rate`: samples a second that the model takes. `most`: seconds that it takes. Raises `MediaRefused`."""
    if (container := coded(data)) is not None:
        longest = min(limits.sound, most)
        samples = decode_sound(data, container, limits, rate=rate, seconds=longest)
        _check(len(samples) / rate, f"over {longest:g} s", limits, most)  # no more of it was decoded
        return samples
    wav = open_wav(data)
    _check(wav.seconds, f"{wav.seconds:.2f} s", limits, most)  # first: a slow rate would become many samples
    return resampled(wav.mono(), wav.rate, rate)


def sound_bytes(data: bytes, limits: MediaLimits) -> int:
    """What `open_sound` takes, at most: samples are few for the bytes of a coded file, and many for those of a WAV."""
    if coded(data) is not None:
        return int(limits.sound * FASTEST_MODEL) * SAMPLE_BYTES
    wav = open_wav(data)
    return len(wav.body) * 8 // wav.bits * SAMPLE_BYTES


def _check(seconds: float, length: str, limits: MediaLimits, most: float) -> None:
    if seconds > limits.sound:
        raise MediaRefused(f"a sound is {length} long; this server takes {limits.sound:g} s (--media-seconds)")
    if seconds > most:
        raise MediaRefused(f"a sound is {length} long; this model hears {most:g} s at a time. Send it in several parts")


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
