"""Gemma 4's sounds: how loud each band of the mel scale is, a hundred times a second."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from millstream.errors import MediaRefused
from millstream.media.port import Mark, Prepared
from millstream.media.processors.base import ModelFiles, Settings
from millstream.media.wav import Samples

Table = npt.NDArray[np.float64]


class Gemma4SoundProcessor:
    def __init__(self, files: ModelFiles, name: str) -> None:
        sounds = files.sounds
        self.mark = Mark(name, files.id_of("audio_token_id", "audio_token_index"))
        self._begin = str(files.words.get("boa_token") or "<|audio>")
        self._end = str(files.words.get("eoa_token") or "<audio|>")
        self._mel = MelFrames(sounds)
        self.rate = self._mel.rate
        self.seconds = int(sounds.get("audio_seq_length") or 750) * int(sounds.get("audio_ms_per_token") or 40) / 1000

    def prepare(self, samples: Samples) -> Prepared:
        features = self._mel(samples)
        if not len(features):
            raise MediaRefused(
                f"a sound of {1000 * len(samples) / self.rate:.1f} ms is too short for this model: it needs more "
                f"than {1000 * (self._mel.shortest - 1) / self.rate:.0f} ms"
            )
        # Two convolutions of the tower take every second frame. mlx-vlm's processor counts steps of 40 ms instead, and
        # so for a quarter of all lengths one more than the tower gives.
        places = math.ceil(math.ceil(len(features) / 2) / 2)
        text = f"{self._begin}{self.mark.text * places}{self._end}"
        return Prepared("audio", {"input_features": features[np.newaxis]}, text, places)


class MelFrames:
    """Frames that are whole: those that the end of a sound cuts are left out, so there is nothing to mask. Noise is not
    added where the settings ask for it (`dither`): the same sound must be the same numbers."""

    def __init__(self, sounds: Settings) -> None:
        self.rate = int(sounds.get("sampling_rate") or 16_000)
        self._length = int(sounds.get("frame_length") or round(self.rate * _ms(sounds, "frame_length_ms", 20)))
        self._hop = int(sounds.get("hop_length") or round(self.rate * _ms(sounds, "hop_length_ms", 10)))
        self._size = 2 ** math.ceil(math.log2(self._length)) * (2 if sounds.get("fft_overdrive") else 1)
        self._scale = float(sounds.get("input_scale_factor") or 1.0)
        self._emphasis = float(sounds.get("preemphasis") or 0.0)
        self._htk = bool(sounds.get("preemphasis_htk_flavor", True))
        self._floor = float(sounds.get("mel_floor") or 1e-3)
        self._window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(self._length) / self._length)
        highest = float(sounds.get("max_frequency") or 8_000.0)
        bands = int(sounds.get("feature_size") or 128)
        self._bands = mel_bands(self._size, bands, float(sounds.get("min_frequency") or 0.0), highest, self.rate)
        self._mean = np.asarray(sounds.get("per_bin_mean") or 0.0, np.float64)
        self._deviation = np.asarray(sounds.get("per_bin_stddev") or 1.0, np.float64)

    @property
    def shortest(self) -> int:
        """Samples of a sound that has one frame."""
        return self._length + 1 - self._length // 2

    def __call__(self, samples: Samples) -> npt.NDArray[np.float32]:
        """(frames, bands). The first frame has its middle at the beginning of the sound."""
        line = np.pad(samples.astype(np.float64) * self._scale, (self._length // 2, 0))
        if len(samples) < self.shortest:
            return np.zeros((0, self._bands.shape[1]), np.float32)
        # One more than the frame has: the one before or behind it, for what is emphasised.
        wide = np.lib.stride_tricks.sliding_window_view(line, self._length + 1)[:: self._hop]
        spectrum = np.abs(np.fft.rfft(self._emphasised(wide) * self._window, n=self._size))
        loud = np.log(spectrum @ self._bands + self._floor)
        return ((loud - self._mean) / self._deviation).astype(np.float32)

    def _emphasised(self, wide: Table) -> Table:
        if not self._emphasis:
            return wide[:, :-1]
        if not self._htk:
            return wide[:, 1:] - self._emphasis * wide[:, :-1]
        first = wide[:, :1] * (1 - self._emphasis)
        return np.concatenate([first, wide[:, 1:-1] - self._emphasis * wide[:, :-2]], axis=1)


def mel_bands(size: int, bands: int, lowest: float, highest: float, rate: int) -> Table:
    """(frequencies of the spectrum, bands): triangles of equal width on the mel scale, each as high as one."""
    first, last = (2595 * math.log10(1 + hertz / 700) for hertz in (lowest, highest))
    mels = np.linspace(first, last, bands + 2)
    edges = 700 * (10 ** (mels / 2595) - 1)
    distances = edges[None, :] - np.linspace(0, rate / 2, size // 2 + 1)[:, None]
    widths = np.diff(edges)
    rising, falling = -distances[:, :-2] / widths[:-1], distances[:, 2:] / widths[1:]
    triangles: Table = np.maximum(0, np.minimum(rising, falling))
    return triangles


def _ms(sounds: Settings, name: str, usual: float) -> float:
    return float(sounds.get(name) or usual) / 1000
