"""Audio processor of Gemma 4: log-mel spectrograms with a hundred frames per second."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from millstream.errors import MediaRefused
from millstream.media.port import Placeholder, PreparedMedia
from millstream.media.processors.base import ModelFiles, Settings
from millstream.media.wav import Samples

Matrix = npt.NDArray[np.float64]


class Gemma4AudioProcessor:
    def __init__(self, files: ModelFiles, audio_token: str) -> None:
        settings = files.audio
        self.placeholder = Placeholder(audio_token, files.token_id("audio_token_id", "audio_token_index"))
        self._begin = str(files.tokenizer.get("boa_token") or "<|audio>")
        self._end = str(files.tokenizer.get("eoa_token") or "<audio|>")
        self._spectrogram = LogMelSpectrogram(settings)
        self.rate = self._spectrogram.rate
        max_tokens = int(settings.get("audio_seq_length") or 750)
        self.max_seconds = max_tokens * int(settings.get("audio_ms_per_token") or 40) / 1000

    def prepare(self, samples: Samples) -> PreparedMedia:
        features = self._spectrogram(samples)
        if not len(features):
            raise MediaRefused(
                f"the audio of {1000 * len(samples) / self.rate:.1f} ms is too short for this model: it needs more "
                f"than {1000 * (self._spectrogram.min_samples - 1) / self.rate:.0f} ms"
            )
        # The audio tower halves the frames in two strided convolutions. mlx-vlm's processor counts steps of 40 ms
        # instead, which for a quarter of all lengths gives one token more than the tower outputs.
        tokens = math.ceil(math.ceil(len(features) / 2) / 2)
        text = f"{self._begin}{self.placeholder.text * tokens}{self._end}"
        return PreparedMedia("audio", {"input_features": features[np.newaxis]}, text, tokens)


class LogMelSpectrogram:
    """Complete frames only: frames that the end of the audio cuts are dropped, so no mask is needed. Dithering
    (`dither`) is not applied: equal audio must give equal features."""

    def __init__(self, settings: Settings) -> None:
        self.rate = int(settings.get("sampling_rate") or 16_000)
        self._length = int(settings.get("frame_length") or round(self.rate * _seconds(settings, "frame_length_ms", 20)))
        self._hop = int(settings.get("hop_length") or round(self.rate * _seconds(settings, "hop_length_ms", 10)))
        self._fft_size = 2 ** math.ceil(math.log2(self._length)) * (2 if settings.get("fft_overdrive") else 1)
        self._scale = float(settings.get("input_scale_factor") or 1.0)
        self._preemphasis = float(settings.get("preemphasis") or 0.0)
        self._htk = bool(settings.get("preemphasis_htk_flavor", True))
        self._floor = float(settings.get("mel_floor") or 1e-3)
        self._window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(self._length) / self._length)
        low, high = float(settings.get("min_frequency") or 0.0), float(settings.get("max_frequency") or 8_000.0)
        bands = int(settings.get("feature_size") or 128)
        self._filters = mel_filter_bank(self._fft_size, bands, low, high, self.rate)
        self._mean = np.asarray(settings.get("per_bin_mean") or 0.0, np.float64)
        self._std = np.asarray(settings.get("per_bin_stddev") or 1.0, np.float64)

    @property
    def min_samples(self) -> int:
        """The shortest audio that gives a frame."""
        return self._length + 1 - self._length // 2

    def __call__(self, samples: Samples) -> npt.NDArray[np.float32]:
        """(frames, bands). The first frame is centred on the start of the audio."""
        padded = np.pad(samples.astype(np.float64) * self._scale, (self._length // 2, 0))
        if len(samples) < self.min_samples:
            return np.zeros((0, self._filters.shape[1]), np.float32)
        # One sample more than a frame has: its neighbour before or after, for pre-emphasis.
        windows = np.lib.stride_tricks.sliding_window_view(padded, self._length + 1)[:: self._hop]
        spectrum = np.abs(np.fft.rfft(self._emphasize(windows) * self._window, n=self._fft_size))
        log_mel = np.log(spectrum @ self._filters + self._floor)
        return ((log_mel - self._mean) / self._std).astype(np.float32)

    def _emphasize(self, windows: Matrix) -> Matrix:
        if not self._preemphasis:
            return windows[:, :-1]
        if not self._htk:
            return windows[:, 1:] - self._preemphasis * windows[:, :-1]
        first = windows[:, :1] * (1 - self._preemphasis)
        return np.concatenate([first, windows[:, 1:-1] - self._preemphasis * windows[:, :-2]], axis=1)


def mel_filter_bank(fft_size: int, bands: int, low: float, high: float, rate: int) -> Matrix:
    """(FFT bins, bands): triangular filters of equal width on the mel scale, each with a peak of 1."""
    first, last = (2595 * math.log10(1 + hertz / 700) for hertz in (low, high))
    mels = np.linspace(first, last, bands + 2)
    edges = 700 * (10 ** (mels / 2595) - 1)
    distances = edges[None, :] - np.linspace(0, rate / 2, fft_size // 2 + 1)[:, None]
    widths = np.diff(edges)
    rising, falling = -distances[:, :-2] / widths[:-1], distances[:, 2:] / widths[1:]
    filters: Matrix = np.maximum(0, np.minimum(rising, falling))
    return filters


def _seconds(settings: Settings, name: str, default_ms: float) -> float:
    return float(settings.get(name) or default_ms) / 1000
