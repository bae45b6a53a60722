"""Log-mel spectrograms in NumPy, with windows and filters that belong to the model that uses them.

mlx-audio keeps its windows and filters in caches that all threads share, and makes them lazily: what one engine's
thread has put there, another one cannot evaluate. These are plain numbers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from millstream.speech_types import SPEECH_RATE, Samples

Frames = npt.NDArray[np.float32]
"""One row per frame, one column per mel band."""


def hann(size: int, *, periodic: bool) -> npt.NDArray[np.float64]:
    """Periodic: as if it went on after its last value, as spectra of long audio want it."""
    steps = size if periodic else size - 1
    return 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(size) / steps)


def slaney_filters(bands: int, n_fft: int, rate: int = SPEECH_RATE) -> npt.NDArray[np.float64]:
    """Triangles on Slaney's mel scale, each of the same area: (bands, n_fft // 2 + 1)."""
    edges = _slaney_hertz(np.linspace(0.0, _slaney_mels(rate / 2), bands + 2))
    bins = np.linspace(0, rate / 2, n_fft // 2 + 1)
    rising = (bins - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - bins) / (edges[2:] - edges[1:-1])[:, None]
    triangles = np.maximum(0.0, np.minimum(rising, falling))
    return np.asarray(triangles * (2 / (edges[2:] - edges[:-2]))[:, None])


_LINEAR_HERTZ, _LINEAR_MELS, _LOG_STEP = 1000.0, 15.0, np.log(6.4) / 27
"""Up to 1000 Hz the scale is linear, from there on logarithmic."""


def _slaney_mels(hertz: float) -> float:
    if hertz < _LINEAR_HERTZ:
        return hertz * _LINEAR_MELS / _LINEAR_HERTZ
    return float(_LINEAR_MELS + np.log(hertz / _LINEAR_HERTZ) / _LOG_STEP)


def _slaney_hertz(mels: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    high = _LINEAR_HERTZ * np.exp(_LOG_STEP * (mels - _LINEAR_MELS))
    return np.where(mels < _LINEAR_MELS, mels * _LINEAR_HERTZ / _LINEAR_MELS, high)


class _Spectra:
    """Mel bands of the power of overlapping frames. A frame is centred on each multiple of `hop`."""

    def __init__(self, window: npt.NDArray[np.float64], n_fft: int, hop: int, bands: int, *, reflect: bool) -> None:
        before = (n_fft - len(window)) // 2
        self._window = np.pad(window, (before, n_fft - len(window) - before)).astype(np.float32)
        self._filters = slaney_filters(bands, n_fft).T.astype(np.float32)
        self._n_fft, self._hop, self._reflect = n_fft, hop, reflect

    def __call__(self, samples: Samples) -> Frames:
        half = self._n_fft // 2
        # What is shorter than half a frame has too little to reflect.
        mode = "reflect" if self._reflect and len(samples) > half else "constant"
        padded = np.pad(samples, half, mode=mode)  # type: ignore[call-overload]
        frames = np.lib.stride_tricks.sliding_window_view(padded, self._n_fft)[:: self._hop]
        power = np.abs(np.fft.rfft(frames * self._window)).astype(np.float32) ** 2
        return np.asarray(power @ self._filters)


class NemoSpectrogram:
    """As NVIDIA NeMo's models take it: high frequencies raised, natural logarithms, each band normalised on its own."""

    def __init__(
        self, *, bands: int, n_fft: int, window: int, hop: int, preemphasis: float, floor: float, per_band: bool
    ) -> None:
        self._spectra = _Spectra(hann(window, periodic=False), n_fft, hop, bands, reflect=False)
        self._preemphasis, self._floor, self._per_band = preemphasis, floor, per_band

    def __call__(self, samples: Samples) -> Frames:
        raised = np.concatenate([samples[:1], samples[1:] - np.float32(self._preemphasis) * samples[:-1]])
        logs = np.log(self._spectra(raised) + np.float32(self._floor))
        if self._per_band:
            mean = logs.mean(0)
            spread = np.sqrt(((logs - mean) ** 2).sum(0) / max(len(logs) - 1, 1))
        else:
            mean, spread = logs.mean(), logs.std()
        return np.asarray((logs - mean) / (spread + np.float32(1e-5)), np.float32)


class WhisperSpectrogram:
    """As Whisper and models with its encoder want it: decimal logarithms, at most 80 dB below the peak."""

    HOP = 160

    def __init__(self, bands: int) -> None:
        self._spectra = _Spectra(hann(400, periodic=True), 400, self.HOP, bands, reflect=True)

    def __call__(self, samples: Samples) -> Frames:
        """One frame per 10 ms. The last one, centred on the end, is left out."""
        logs = np.log10(np.maximum(self._spectra(samples)[: max(len(samples) // self.HOP, 1)], 1e-10))
        return np.asarray((np.maximum(logs, logs.max() - 8) + 4) / 4, np.float32)
