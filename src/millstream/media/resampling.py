"""Changes the sample rate of audio piece by piece: a band-limited polyphase filter in NumPy.

`audio.resample` works on a whole file at once, in the frequency domain. Speech comes sentence by sentence, and a filter
that starts anew for each would click at the seams.
"""

from __future__ import annotations

import math

import numpy as np

from millstream.speech_types import Samples

ZERO_CROSSINGS = 24
"""Of the sinc, on each side of its centre: longer is sharper."""
KAISER_BETA = 9.0
"""Of the window: what is out of band is some 90 dB down."""
CUTOFF = 0.95
"""Fraction of the band that is kept. The rest is the filter's slope."""
BLOCK = 8_192
"""Samples that are made at once, which bounds the memory."""


class Resampler:
    """Converts from `rate` to `target_rate`. Feed it with `push`, then take the rest with `finish`. All pieces together
    have `target_rate / rate` times the samples, rounded up, without a delay."""

    def __init__(self, rate: int, target_rate: int) -> None:
        divisor = math.gcd(rate, target_rate)
        self._up, self._down = target_rate // divisor, rate // divisor
        band = min(1.0, target_rate / rate) * CUTOFF
        self._half = math.ceil(ZERO_CROSSINGS / band)
        """Input samples on each side of an output sample that count."""
        self._filters = _filters(self._up, self._half, band)
        self._pending: Samples = np.zeros(self._half, np.float32)
        self._start = -self._half
        """Which input sample `_pending` begins with."""
        self._received = 0
        self._made = 0

    def push(self, samples: Samples) -> Samples:
        self._received += len(samples)
        return self._make(samples, self._received - self._half)

    def finish(self) -> Samples:
        """What needs samples after the last one: silence stands for them."""
        return self._make(np.zeros(2 * self._half, np.float32), self._received)

    def _make(self, samples: Samples, before: int) -> Samples:
        """All samples that stand before this sample of the input."""
        self._pending = np.concatenate([self._pending, samples])
        end = max(self._made, -(-before * self._up // self._down))
        pieces = [self._block(first, min(first + BLOCK, end)) for first in range(self._made, end, BLOCK)]
        self._made = end
        needed = end * self._down // self._up - self._half
        if (done := needed - self._start) > 0:
            self._pending = self._pending[done:].copy()
            self._start = needed
        return np.concatenate(pieces) if pieces else np.zeros(0, np.float32)

    def _block(self, first: int, last: int) -> Samples:
        centres, phases = np.divmod(np.arange(first, last) * self._down, self._up)
        windows = np.lib.stride_tricks.sliding_window_view(self._pending, 2 * self._half + 1)
        made: Samples = np.einsum("ij,ij->i", windows[centres - self._half - self._start], self._filters[phases])
        return made


def _filters(up: int, half: int, band: float) -> Samples:
    """One filter for each place between two input samples that an output sample may have: (up, 2 * half + 1)."""
    offsets = np.arange(-half, half + 1)[None, :] - np.arange(up)[:, None] / up
    window = np.i0(KAISER_BETA * np.sqrt(np.maximum(0, 1 - (offsets / (half + 1)) ** 2))) / np.i0(KAISER_BETA)
    filters = band * np.sinc(band * offsets) * window
    normal: Samples = (filters / filters.sum(axis=1, keepdims=True)).astype(np.float32)
    return normal
