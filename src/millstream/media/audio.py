"""Opens an untrusted audio file as mono samples at the model's sample rate."""

from __future__ import annotations

import math

import numpy as np

from millstream.errors import MediaRefused
from millstream.media.audio_file import decode_audio
from millstream.media.limits import MediaLimits
from millstream.media.signatures import audio_container
from millstream.media.wav import Samples, open_wav

ROLLOFF = 0.05
"""Fraction of the band, at its upper end, that the low-pass filter fades out: a sharp cutoff would ring for long."""
BYTES_PER_SAMPLE = 40
"""Memory per sample while resampling: doubles, and their spectrum."""
MAX_MODEL_RATE = 16_000
"""Samples per second: no supported model takes more."""
PADDING_SECONDS = 0.05
"""Silence appended while resampling, so that ringing at the ends falls there and not into the audio."""


def open_audio(data: bytes, limits: MediaLimits, *, rate: int, max_seconds: float) -> Samples:
    """`rate`: the model's samples per second. `max_seconds`: the longest audio that the model takes. Raises
    `MediaRefused`."""
    if (container := audio_container(data)) is not None:
        longest = min(limits.audio_seconds, max_seconds)
        samples = decode_audio(data, container, limits, rate=rate, seconds=longest)
        check_length(len(samples) / rate, f"over {longest:g} s", limits, max_seconds)  # decoding stopped there
        return samples
    wav = open_wav(data)
    # Checked before decoding: resampling audio of a low rate would give many samples.
    check_length(wav.seconds, f"{wav.seconds:.2f} s", limits, max_seconds)
    return resample(wav.mono(), wav.rate, rate)


def audio_bytes(data: bytes, limits: MediaLimits) -> int:
    """Peak memory of `open_audio`, at most. A compressed file is bounded by its allowed length, a WAV by its size."""
    if audio_container(data) is not None:
        return int(limits.audio_seconds * MAX_MODEL_RATE) * BYTES_PER_SAMPLE
    wav = open_wav(data)
    return len(wav.body) * 8 // wav.bits * BYTES_PER_SAMPLE


def check_length(seconds: float, length: str, limits: MediaLimits, max_seconds: float) -> None:
    if seconds > limits.audio_seconds:
        raise MediaRefused(
            f"the audio is {length} long; this server takes at most {limits.audio_seconds:g} s "
            f"({limits.seconds_option})"
        )
    if seconds > max_seconds:
        raise MediaRefused(
            f"the audio is {length} long; this model takes at most {max_seconds:g} s per file. Split it into parts"
        )


def resample(samples: Samples, rate: int, target_rate: int) -> Samples:
    """Convert from `rate` to `target_rate` in the frequency domain: the spectrum is truncated or zero-padded, so
    nothing aliases."""
    if rate == target_rate:
        return samples
    divisor = math.gcd(rate, target_rate)
    source_unit, target_unit = rate // divisor, target_rate // divisor
    # A unit is the shortest span with a whole number of samples at both rates.
    units = _smooth(math.ceil((len(samples) + PADDING_SECONDS * rate) / source_unit))
    bins = units * min(source_unit, target_unit) // 2 + 1
    spectrum = np.fft.rfft(samples.astype(np.float64), n=units * source_unit)[:bins]
    rolloff = np.linspace(0, 1 / ROLLOFF, len(spectrum)) - (1 / ROLLOFF - 1)
    spectrum *= 0.5 + 0.5 * np.cos(np.pi * np.maximum(rolloff, 0))
    length = math.ceil(len(samples) * target_unit / source_unit)
    resampled = np.fft.irfft(spectrum, n=units * target_unit)[:length]
    return (resampled * (target_unit / source_unit)).astype(np.float32)


def _smooth(least: int) -> int:
    """The smallest number from `least` on without a prime factor above 5: a spectrum of any other length may take a
    hundred times as long."""
    best = 1 << (least - 1).bit_length()
    five = 1
    while five < best:
        three = five
        while three < best:
            twos = -(-least // three)
            best = min(best, three << (twos - 1).bit_length())
            three *= 3
        five *= 5
    return best
