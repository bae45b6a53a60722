"""Opens a sound that nobody has looked at yet: as one channel, at the rate that a model hears."""

from __future__ import annotations

import math

import numpy as np

from millstream.errors import MediaRefused
from millstream.media.limits import MediaLimits
from millstream.media.wav import HOW, Samples, open_wav

FADE = 0.05
"""The share of the band, at its upper end, that is turned down: a band that ends at once would ring for long."""
QUIET = 0.05
"""Seconds of silence behind a sound while it is resampled. What rings at its ends falls there, and not into it."""

_OTHERS = {b"OggS": "Ogg", b"fLaC": "FLAC", b"ID3": "MP3", b"\x1aE\xdf\xa3": "WebM", b"FORM": "AIFF", b"RF64": "RF64"}
"""How files begin that are sounds and not read here."""


def open_sound(data: bytes, limits: MediaLimits, *, rate: int, most: float) -> Samples:
    """`rate`: samples a second that the model takes. `most`: seconds that it takes. Raises `MediaRefused`."""
    if (other := _other(data)) is not None:
        raise MediaRefused(f"this sound is {other}, which is not read here; WAV is: {HOW}")
    wav = open_wav(data)
    # Before any of it is decoded: a slow rate would become many samples.
    if wav.seconds > limits.sound:
        raise MediaRefused(
            f"a sound is {wav.seconds:.2f} s long; this server takes {limits.sound:g} s (--media-seconds)"
        )
    if wav.seconds > most:
        raise MediaRefused(
            f"a sound is {wav.seconds:.2f} s long; this model hears {most:g} s at a time. Send it in several parts"
        )
    return resampled(wav.mono(), wav.rate, rate)


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


def _other(data: bytes) -> str | None:
    for beginning, name in _OTHERS.items():
        if data.startswith(beginning):
            return name
    if data[4:8] == b"ftyp":
        return "MP4 or M4A"
    # The frames of an MP3 begin with eleven bits set.
    return "MP3" if len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0 else None
