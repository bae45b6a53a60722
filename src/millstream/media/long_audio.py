"""Opens audio of any length for transcription, as mono samples at `SPEECH_RATE`.

Memory beyond the samples themselves does not grow with the length: WAV files are decoded and resampled in blocks, and
the child process that decodes other formats sends samples while it decodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from millstream.errors import MediaRefused
from millstream.media.audio import check_length, resample
from millstream.media.decoder_stream import SampleStream, decode_samples
from millstream.media.limits import MediaLimits
from millstream.media.signatures import audio_container
from millstream.media.wav import NOT_FINITE, Wav, open_wav
from millstream.speech_types import SPEECH_RATE, Samples

BLOCK_VALUES = 2**18
"""Values of a WAV file (frames times channels) that are decoded at once."""
OVERLAP_SECONDS = 0.25
"""Audio around a block that is resampled with it: at a block's own end the filter would ring."""
WORKING_BYTES = 64 * 2**20
"""Memory for a block while it is resampled, or for a decoder's buffers."""
BYTES_PER_SAMPLE = 4.5
"""A float, and what a growing buffer allocates ahead."""
LOWEST_BIT_RATE = 4_000
"""Bits per second of compressed speech, usually at least."""


def open_long_audio(data: bytes, limits: MediaLimits, seconds: float) -> Samples | None:
    """Decodes a file that is at most `seconds` long; returns None if it is longer, which decoding may have to tell.
    Raises `MediaRefused`, also if it is longer than the limits allow."""
    container = audio_container(data)
    if container is None:
        wav = open_wav(data)
        check_length(wav.seconds, _duration(wav.seconds), limits, math.inf)
        return _from_wav(wav) if wav.seconds <= seconds else None
    if seconds <= 0:
        return None
    samples, found = decode_samples(data, SampleStream(container, SPEECH_RATE, seconds), limits)
    if found > seconds and seconds < limits.audio_seconds:
        return None
    check_length(found, f"over {_duration(limits.audio_seconds)}", limits, math.inf)  # decoding stopped there
    _check_finite(samples)
    return samples


def likely_seconds(data: bytes, limits: MediaLimits) -> float:
    """An upper bound on the length of a file that is rarely wrong for compressed files, and never for WAV."""
    if audio_container(data) is None:
        return min(open_wav(data).seconds, limits.audio_seconds)
    return min(len(data) * 8 / LOWEST_BIT_RATE + 60, limits.audio_seconds)


def long_audio_bytes(seconds: float) -> int:
    """Peak memory of `open_long_audio` for a file of at most `seconds`, at most."""
    return int(seconds * SPEECH_RATE * BYTES_PER_SAMPLE) + WORKING_BYTES


def affordable_seconds(memory: int) -> float:
    """The longest audio that can be decoded within so many bytes."""
    return max(memory - WORKING_BYTES, 0) / (SPEECH_RATE * BYTES_PER_SAMPLE)


def _from_wav(wav: Wav) -> Samples:
    samples = np.empty(-(-wav.frames * SPEECH_RATE // wav.rate), np.float32)
    at = 0
    for block in _blocks(wav):
        samples[at : at + len(block)] = block
        at += len(block)
    return samples


def _blocks(wav: Wav) -> Iterator[Samples]:
    """The file at `SPEECH_RATE`, in parts. A part begins where both rates have a sample."""
    divisor = math.gcd(wav.rate, SPEECH_RATE)
    unit, target_unit = wav.rate // divisor, SPEECH_RATE // divisor
    units = max(BLOCK_VALUES // wav.channels // unit, 1)
    overlap = 0 if wav.rate == SPEECH_RATE else math.ceil(OVERLAP_SECONDS * wav.rate / unit)
    for first in range(0, math.ceil(wav.frames / unit), units):
        before = min(overlap, first)
        part = wav.part((first - before) * unit, (first + units + overlap) * unit)
        block = resample(part.mono(), wav.rate, SPEECH_RATE)
        yield block[before * target_unit :][: units * target_unit]


def _check_finite(samples: Samples) -> None:
    for first in range(0, len(samples), BLOCK_VALUES):
        if not np.isfinite(samples[first : first + BLOCK_VALUES]).all():
            raise MediaRefused(NOT_FINITE)


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 600 else f"{seconds / 60:.0f} minutes"
