"""Sounds that are coded, as MP3 is: decoded by the child process that decodes videos."""

from __future__ import annotations

import numpy as np

from millstream.errors import MediaRefused
from millstream.media.decoder import in_child
from millstream.media.limits import MediaLimits
from millstream.media.video_file import container_of
from millstream.media.wav import HOW, Samples

_BEGINNINGS = {b"OggS": "ogg", b"fLaC": "flac", b"ID3": "mp3"}


def coded(data: bytes) -> str | None:
    """Which of FFmpeg's readers is to open this sound; None for what is none of theirs."""
    for beginning, name in _BEGINNINGS.items():
        if data.startswith(beginning):
            return name
    # The frames of an MP3 begin with eleven bits set; AAC's without a container have two more zeros.
    if len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0:
        return "aac" if data[1] & 0xF6 == 0xF0 else "mp3"
    return container_of(data)


def decode_sound(data: bytes, container: str, limits: MediaLimits, *, rate: int, seconds: float) -> Samples:
    """At least the first `seconds` of it. Raises `MediaRefused`."""
    order = {"kind": "audio", "container": container, "rate": rate, "longest": seconds}
    _, body = in_child(order, data, limits, "sound", f"WAV is read without it: {HOW}")
    samples = np.frombuffer(body, np.float32)
    if not np.isfinite(samples).all():
        raise MediaRefused("a sound has samples that are no numbers (NaN or infinite); write it again")
    return samples
