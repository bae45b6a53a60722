"""Decodes compressed audio (MP3, AAC, FLAC, Ogg, ...) in the child process that also decodes video."""

from __future__ import annotations

import numpy as np

from millstream.errors import MediaRefused
from millstream.media.decoder import in_child
from millstream.media.limits import MediaLimits
from millstream.media.wav import CONVERT_HINT, NOT_FINITE, Samples


def decode_audio(data: bytes, container: str, limits: MediaLimits, *, rate: int, seconds: float) -> Samples:
    """At least the first `seconds`, if the file is that long. Raises `MediaRefused`."""
    job = {"kind": "audio", "container": container, "rate": rate, "longest": seconds}
    _, body = in_child(job, data, limits, "audio file", f"WAV needs no decoder: {CONVERT_HINT}")
    samples = np.frombuffer(body, np.float32)
    if not np.isfinite(samples).all():
        raise MediaRefused(NOT_FINITE)
    return samples
