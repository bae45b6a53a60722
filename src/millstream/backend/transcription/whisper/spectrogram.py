"""The log-mel spectrogram that Whisper reads. Owner only.

Window and filters belong to one engine. The transform is a matmul with the tables of the discrete Fourier transform:
every device computes it the same way.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from millstream.speech_types import SPEECH_RATE

FFT, HOP = 400, 160
"""Samples per frame, and from one frame to the next: a hundred frames per second."""
BINS = FFT // 2 + 1
_LOG_FROM, _LINEAR_STEP, _LOG_STEP = 1000.0, 200.0 / 3, np.log(6.4) / 27
"""Slaney's mel scale: linear below 1 kHz, logarithmic above."""

Floats = npt.NDArray[np.float32]


class LogMel:
    def __init__(self, mels: int, frames: int) -> None:
        """`frames` of the result: audio is padded with silence to it."""
        self._frames = frames
        times = np.arange(FFT)
        angles = 2 * np.pi * np.outer(times, np.arange(BINS)) / FFT
        hann = 0.5 - 0.5 * np.cos(2 * np.pi * times / FFT)
        tables = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * hann[:, None]
        self._tables = mx.array(tables.astype(np.float32))
        self._filters = mx.array(mel_filters(mels).T)
        mx.eval(self._tables, self._filters)

    @property
    def arrays(self) -> list[mx.array]:
        return [self._tables, self._filters]

    def __call__(self, windows: Sequence[Floats]) -> mx.array:
        """(windows, frames, mels), in 32 bits."""
        audio = np.zeros((len(windows), self._frames * HOP), np.float32)
        for row, samples in zip(audio, windows, strict=True):
            row[: len(samples)] = samples[: len(row)]
        padded = mx.array(np.pad(audio, ((0, 0), (FFT // 2, FFT // 2)), mode="reflect"))
        stride = padded.shape[1]
        framed = mx.as_strided(padded, (len(windows), self._frames, FFT), (stride, HOP, 1))
        spectrum = framed @ self._tables
        power = spectrum[..., :BINS].square() + spectrum[..., BINS:].square()
        logs = mx.log10(mx.maximum(power @ self._filters, 1e-10))
        logs = mx.maximum(logs, logs.max(axis=(1, 2), keepdims=True) - 8.0)
        return (logs + 4.0) / 4.0


def mel_filters(mels: int) -> Floats:
    """(mels, bins): triangles of equal area, evenly spaced on the mel scale."""
    bins = np.fft.rfftfreq(FFT, 1 / SPEECH_RATE)
    edges = _hertz(np.linspace(_mel(0.0), _mel(SPEECH_RATE / 2), mels + 2))
    rising = (bins[None] - edges[:-2, None]) / np.diff(edges)[:-1, None]
    falling = (edges[2:, None] - bins[None]) / np.diff(edges)[1:, None]
    heights = 2 / (edges[2:] - edges[:-2])
    return np.asarray(np.maximum(0, np.minimum(rising, falling)) * heights[:, None], np.float32)


def _mel(hertz: float) -> float:
    if hertz < _LOG_FROM:
        return hertz / _LINEAR_STEP
    return float(_LOG_FROM / _LINEAR_STEP + np.log(hertz / _LOG_FROM) / _LOG_STEP)


def _hertz(mels: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    first = _LOG_FROM / _LINEAR_STEP
    return np.where(mels < first, mels * _LINEAR_STEP, _LOG_FROM * np.exp(_LOG_STEP * (mels - first)))
