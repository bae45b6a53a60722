"""Changes the sample rate of audio that arrives piece by piece."""

from __future__ import annotations

import math

import numpy as np

from millstream.media.wav import Samples

HALF_TAPS = 16
"""Samples on each side, at the lower of both rates, that an output sample is computed from."""
CUTOFF = 0.92
"""Of the lower rate's band: above it, the filter fades out."""
KAISER_BETA = 8.0
BLOCK = 16_384
"""Output samples that are computed at a time: each takes the memory of its whole window."""


class StreamResampler:
    """Converts from one rate to another by a windowed-sinc filter. Its pieces joined are what one call for all of the
    audio would give. `flush` gives the end, which waits for samples that never come.
    """

    def __init__(self, rate: int, target_rate: int) -> None:
        divisor = math.gcd(rate, target_rate)
        self._up, self._down = target_rate // divisor, rate // divisor
        scale = max(1.0, rate / target_rate)
        self._half = math.ceil(HALF_TAPS * scale)
        self._filters = _filters(self._up, self._half, CUTOFF / scale)
        self._held: Samples = np.zeros(self._half, np.float32)
        """Input that later output depends on. It begins with silence."""
        self._received = 0
        self._produced = 0
        self._dropped = -self._half
        """The number of the first held sample."""

    def feed(self, samples: Samples) -> Samples:
        if self._up == self._down:
            return samples
        self._received += len(samples)
        self._held = np.concatenate((self._held, samples))
        # Output n lies at n * down / up of the input, and needs `half` samples after that.
        ready = max(0, ((self._received - self._half) * self._up - 1) // self._down + 1)
        return self._produce(ready)

    def flush(self) -> Samples:
        if self._up == self._down:
            return np.zeros(0, np.float32)
        total = math.ceil(self._received * self._up / self._down)
        self._held = np.concatenate((self._held, np.zeros(self._half + 1, np.float32)))
        return self._produce(total)

    def _produce(self, until: int) -> Samples:
        if until <= self._produced:
            return np.zeros(0, np.float32)
        blocks = [self._block(start, min(start + BLOCK, until)) for start in range(self._produced, until, BLOCK)]
        self._produced = until
        keep = until * self._down // self._up - self._half + 1 - self._dropped
        if keep > 0:
            self._held = self._held[keep:].copy()
            self._dropped += keep
        return np.concatenate(blocks)

    def _block(self, start: int, end: int) -> Samples:
        numbers = np.arange(start, end, dtype=np.int64) * self._down
        places, phases = numbers // self._up, numbers % self._up
        windows = np.lib.stride_tricks.sliding_window_view(self._held, 2 * self._half)
        # The window of a place holds the samples from place - half + 1 to place + half.
        first = places - self._half + 1 - self._dropped
        return np.einsum("nt,nt->n", windows[first], self._filters[phases]).astype(np.float32)


def _filters(up: int, half: int, cutoff: float) -> Samples:
    """One row of weights per phase: for the input samples from `half - 1` before the output's place to `half` after."""
    offsets = np.arange(-half + 1, half + 1)[None, :] - np.arange(up)[:, None] / up
    window = np.i0(KAISER_BETA * np.sqrt(np.clip(1 - (offsets / half) ** 2, 0, 1))) / np.i0(KAISER_BETA)
    filters = cutoff * np.sinc(cutoff * offsets) * window
    filters /= filters.sum(axis=1, keepdims=True)
    return filters.astype(np.float32)
