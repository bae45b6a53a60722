"""The harmonic source of the vocoder, and its short-time Fourier transform. Owner only.

Everything here is float32: phases of half precision would be noise.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from millstream.backend.speech.kokoro.rows import Rows
from millstream.backend.speech.kokoro.tensors import Tensors
from millstream.models.kokoro_config import SAMPLE_RATE

HARMONICS = 9
"""The fundamental and its overtones."""
AMPLITUDE, VOICED_NOISE, UNVOICED_NOISE = 0.1, 0.003, 0.1 / 3
VOICED_HZ = 10.0
SEED = 0
"""The original draws its noise anew each time. Here the same text sounds the same each time, alone or in a batch."""


class HarmonicSource:
    """Sines at the pitch and its multiples where there is a voice, noise where there is none."""

    def __init__(self, tensors: Tensors, samples_per_value: int) -> None:
        """`samples_per_value`: samples for each value of the pitch curve."""
        self._weight = tensors.keep(tensors.plain("decoder.generator.m_source.l_linear.weight").reshape(-1), mx.float32)
        self._bias = tensors.keep(tensors.plain("decoder.generator.m_source.l_linear.bias"), mx.float32)
        self._steps = samples_per_value

    def __call__(self, pitch: mx.array, rows: Rows, *, noise: bool = True) -> mx.array:
        """From (rows, values, 1) to (rows, samples)."""
        pitch = pitch.astype(mx.float32)[..., 0]
        length = pitch.shape[1]
        sines = self._sines(pitch)
        voiced = mx.repeat((pitch > VOICED_HZ).astype(mx.float32), self._steps, axis=1)
        merged = voiced * AMPLITUDE * (sines @ self._weight)
        if noise:
            # The harmonics' noises are independent, so their weighted sum is one noise with the weights' length.
            strength = mx.sqrt(mx.sum(mx.square(self._weight)))
            level = voiced * VOICED_NOISE + (1 - voiced) * UNVOICED_NOISE
            drawn = np.random.default_rng(SEED).standard_normal(length * self._steps, np.float32)
            merged = merged + level * strength * mx.array(drawn)
        return mx.tanh(merged + self._bias)

    def _sines(self, pitch: mx.array) -> mx.array:
        """(rows, samples, harmonics). The phase is known at the middle of each value and linear between two."""
        count, length = pitch.shape
        cycles = pitch[..., None] * (mx.arange(1, HARMONICS + 1) * (self._steps / SAMPLE_RATE))
        at_values = mx.cumsum(cycles - mx.floor(cycles), axis=1)
        at_values = at_values - mx.floor(at_values)  # whole cycles do not matter, and cost precision
        first, last = at_values[:, :1], at_values[:, -1:]
        starts = mx.concatenate([first, at_values], axis=1)
        still = mx.zeros_like(first)
        slopes = mx.concatenate([still, cycles[:, 1:], mx.zeros_like(last)], axis=1)
        ramp = (mx.arange(self._steps, dtype=mx.float32) + 0.5) / self._steps
        phases = starts[:, :, None] + slopes[:, :, None] * ramp[:, None]
        phases = phases.reshape(count, (length + 1) * self._steps, HARMONICS)
        half = self._steps // 2
        return mx.sin((2 * np.pi) * phases[:, half : half + length * self._steps])


class Fourier:
    """Transforms with a periodic Hann window, as PyTorch's `stft` and `istft` with `center=True` have them."""

    def __init__(self, n_fft: int, hop: int) -> None:
        self._n_fft, self._hop = n_fft, hop
        times, bins = np.arange(n_fft), np.arange(n_fft // 2 + 1)
        angles = 2 * np.pi * np.outer(times, bins) / n_fft
        window = 0.5 - 0.5 * np.cos(2 * np.pi * times / n_fft)
        cosines, sines = np.cos(angles), np.sin(angles)
        sines[:, [0, -1]] = 0  # exactly: their sign decides between +π and -π
        twice = np.where((bins == 0) | (bins == n_fft // 2), 1, 2) / n_fft
        self._forward = _array(np.concatenate([cosines, -sines], axis=1) * window[:, None])
        self._inverse = _array(np.concatenate([cosines * twice, -sines * twice], axis=1).T * window)
        self._squares = _array(window**2)

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return self._forward, self._inverse, self._squares

    def transform(self, signal: mx.array, rows: Rows) -> mx.array:
        """(rows, samples) to (rows, frames, magnitudes and phases). `rows` counts samples."""
        places = np.arange(rows.longest // self._hop + 1)[:, None] * self._hop + np.arange(self._n_fft)
        places = np.abs(places - self._n_fft // 2)[None]
        lengths = np.array(rows.lengths)[:, None, None]
        places = np.where(places < lengths, places, np.maximum(2 * (lengths - 1) - places, 0))
        if len(set(rows.lengths)) == 1:
            framed = signal[:, mx.array(places[0])]
        else:
            flat = mx.take_along_axis(signal, mx.array(places.reshape(len(places), -1)), axis=1)
            framed = flat.reshape(places.shape)
        real, imaginary = mx.split(framed @ self._forward, 2, axis=-1)
        magnitude = mx.sqrt(mx.square(real) + mx.square(imaginary))
        return mx.concatenate([magnitude, mx.arctan2(imaginary + 0.0, real)], axis=-1)

    def inverse(self, magnitude: mx.array, phase: mx.array, rows: Rows) -> mx.array:
        """(rows, frames, bins) to (rows, samples). `rows` counts frames. Divides by the sum of squared windows."""
        spectrum = mx.concatenate([magnitude * mx.cos(phase), magnitude * mx.sin(phase)], axis=-1)
        summed = self._overlap_add(rows.mask(spectrum @ self._inverse))
        ones = rows.mask(mx.ones((len(rows.lengths), rows.longest, 1)))
        return summed / mx.maximum(self._overlap_add(ones * self._squares), 1e-8)

    def _overlap_add(self, frames: mx.array) -> mx.array:
        count, length, size = frames.shape
        blocks = size // self._hop
        parts = frames.reshape(count, length, blocks, self._hop)
        total = mx.zeros((count, length + blocks - 1, self._hop))
        for block in range(blocks):
            total = total + mx.pad(parts[:, :, block], [(0, 0), (block, blocks - 1 - block), (0, 0)])
        half = self._n_fft // 2
        return total.reshape(count, -1)[:, half : half + (length - 1) * self._hop]


def _array(values: NDArray[np.float64]) -> mx.array:
    return mx.array(values.astype(np.float32))
