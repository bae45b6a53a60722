"""Samples as 16-bit integers, and the WAV header before them."""

from __future__ import annotations

import struct

import numpy as np

from millstream.speech_types import Samples

UNKNOWN_LENGTH = 2**32 - 1
"""The length in the header of a WAV stream: players then read to its end."""


def to_pcm16(samples: Samples) -> bytes:
    """Signed 16-bit little-endian. What is too loud is limited, and NaN is silence."""
    limited = np.clip(np.nan_to_num(samples, nan=0.0, posinf=1.0, neginf=-1.0), -1.0, 1.0)
    return np.round(limited * 32767).astype("<i2").tobytes()


def wav_header(rate: int, size: int | None) -> bytes:
    """Of mono 16-bit samples. `size`: of their bytes; None if it is not known yet."""
    form = struct.pack("<HHIIHH", 1, 1, rate, rate * 2, 2, 16)
    total = UNKNOWN_LENGTH if size is None else 36 + size
    return (
        struct.pack("<4sI8sI", b"RIFF", total, b"WAVEfmt ", len(form))
        + form
        + struct.pack("<4sI", b"data", UNKNOWN_LENGTH if size is None else size)
    )
