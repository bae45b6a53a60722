"""Rows of unequal length in one padded batch."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import mlx.core as mx
import numpy as np


@dataclass(frozen=True)
class Rows:
    """The lengths of a batch's rows. What lies beyond them must be zero wherever a layer looks beyond one position."""

    lengths: tuple[int, ...]

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def scaled(self, factor: int, more: int = 0) -> Rows:
        return Rows(tuple(length * factor + more for length in self.lengths))

    @functools.cached_property
    def keep(self) -> mx.array | None:
        """(rows, longest, 1): True within each row. None if all are equally long."""
        if len(set(self.lengths)) == 1:
            return None
        return mx.array(np.arange(self.longest)[None, :, None] < np.array(self.lengths)[:, None, None])

    def mask(self, x: mx.array) -> mx.array:
        """Zeros beyond each row."""
        return x if self.keep is None else mx.where(self.keep, x, mx.zeros((), x.dtype))

    def moments(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Mean and variance over each row, in float32: (rows, 1, channels). `x` is zero beyond its rows."""
        x = x.astype(mx.float32)
        if self.keep is None:
            mean = mx.mean(x, axis=1, keepdims=True)
            return mean, mx.mean(mx.square(x - mean), axis=1, keepdims=True)
        counts = mx.array(self.lengths, mx.float32)[:, None, None]
        mean = mx.sum(x, axis=1, keepdims=True) / counts
        return mean, mx.sum(mx.square(self.mask(x - mean)), axis=1, keepdims=True) / counts
