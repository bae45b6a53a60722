"""Decodes compressed audio (MP3, AAC, FLAC, Ogg, ...) in the child process that also decodes video."""

from __future__ import annotations

import numpy as np

from millstream.errors import MediaRefused
from millstream.media.decoder import in_child
from millstream.media.limits import MediaLimits
from millstream.media.video_file import video_container
from millstream.media.wav import CONVERT_HINT, NOT_FINITE, Samples

_SIGNATURES = {b"OggS": "ogg", b"fLaC": "flac", b"ID3": "mp3"}


def audio_container(data: bytes) -> str | None:
    """The FFmpeg demuxer for this file, by its first bytes. Returns None if it is not a compressed audio file."""
    for signature, name in _SIGNATURES.items():
        if data.startswith(signature):
            return name
    # An MP3 frame starts with eleven set bits; in a raw AAC (ADTS) frame two zero bits follow.
    if len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0:
        return "aac" if data[1] & 0xF6 == 0xF0 else "mp3"
    return video_container(data)


def decode_audio(data: bytes, container: str, limits: MediaLimits, *, rate: int, seconds: float) -> Samples:
    """At least the first `seconds`, if the file is that long. Raises `MediaRefused`."""
    job = {"kind": "audio", "container": container, "rate": rate, "longest": seconds}
    _, body = in_child(job, data, limits, "audio file", f"WAV needs no decoder: {CONVERT_HINT}")
    samples = np.frombuffer(body, np.float32)
    if not np.isfinite(samples).all():
        raise MediaRefused(NOT_FINITE)
    return samples
