"""Audio files of responses, decoded again, and what two sounds have in common."""

from __future__ import annotations

import io
from typing import Any

import av
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
PCM_RATE = 24_000


def heard(data: bytes, form: str) -> tuple[Array, int]:
    """The samples of a file and their rate, by FFmpeg."""
    if form == "pcm":
        return np.frombuffer(data, "<i2") / 32768, PCM_RATE
    container = {"wav": "wav", "mp3": "mp3", "opus": "ogg", "flac": "flac", "aac": "aac"}[form]
    pieces: list[npt.NDArray[Any]] = []
    with av.open(io.BytesIO(data), "r", container) as file:
        rate = file.streams.audio[0].rate
        for frame in file.decode(audio=0):
            samples = frame.to_ndarray()
            scale = 32768 if samples.dtype == np.int16 else 2**31 if samples.dtype == np.int32 else 1
            pieces.append(samples.ravel() / scale)
    return np.concatenate(pieces), rate


def level(samples: npt.NDArray[Any]) -> float:
    """In decibels."""
    return float(20 * np.log10(np.sqrt(np.mean(np.square(samples, dtype=np.float64)))))


def spectrum(samples: npt.NDArray[Any], rate: int, bands: int = 200, top: float = 6_000.0) -> Array:
    """The strength of each band from 0 Hz to `top`."""
    power = np.abs(np.fft.rfft(samples * np.hanning(len(samples)))) ** 2
    hertz = np.fft.rfftfreq(len(samples), 1 / rate)
    sums, _ = np.histogram(hertz, bins=bands, range=(0, top), weights=power)
    return np.log10(sums / sums.max() + 1e-4)


def alike(one: Array, other: Array) -> float:
    """The correlation of two spectra."""
    return float(np.corrcoef(one, other)[0, 1])
