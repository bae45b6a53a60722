"""One vectorised sampler for all rows of a batch, each with its own settings.

The order is OpenAI's and Hugging Face's: bias, penalties, temperature, then top-k, top-p and min-p. A row's choice
depends on its own logits, settings, seed and position only, so the same seed gives the same text in any company.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from millstream.backend.kernels import sample as sample_kernel
from millstream.types import Sampling

# u is in [0, 1); scaled so that u * total stays under the total after rounding.
_BELOW_ONE = 1.0 - 1e-6


def _column(values: list[float]) -> mx.array:
    return mx.array(values, dtype=mx.float32)[:, None]


def seeds(rows: Sequence[Sampling]) -> mx.array:
    return mx.array([(row.seed ^ (row.seed >> 32)) & 0xFFFFFFFF for row in rows], dtype=mx.uint32)


def uniform(row_seeds: mx.array, positions: mx.array) -> mx.array:
    """One number in [0, 1) a row, a function of (seed, position) alone: the pair is the generator's key."""
    keys = mx.stack([row_seeds, positions.astype(mx.uint32)], axis=1)
    numbers: mx.array = mx.vmap(lambda key: mx.random.uniform(key=key))(keys)
    return numbers


class Sampler:
    """Picks one token a row. Built when rows join or leave, called every step; holds no state of its own."""

    def __init__(self, rows: Sequence[Sampling], *, kernel: bool = False) -> None:
        """`kernel`: draw with our CUDA kernel."""
        self._bias = _Bias(rows) if any(row.logit_bias for row in rows) else None
        drawn = [index for index, row in enumerate(rows) if row.temperature > 0]
        self._draw = _Draw([rows[index] for index in drawn]) if drawn else None
        self._settings = sample_kernel.settings_of(rows) if kernel and drawn else None
        self._seeds = seeds(rows) if kernel and drawn else None
        self._drawn = None if len(drawn) == len(rows) else mx.array(drawn, dtype=mx.int32)

    def __call__(self, logits: mx.array, positions: mx.array) -> mx.array:
        """`logits` (rows, vocabulary) after penalties; `positions` (rows,) counts each row's own tokens."""
        if self._bias is not None:
            logits = self._bias(logits.astype(mx.float32))
        if self._settings is not None and self._seeds is not None:
            return sample_kernel.sample(logits, self._settings, uniform(self._seeds, positions))
        logits = logits.astype(mx.float32)
        if self._draw is None:
            return mx.argmax(logits, axis=-1).astype(mx.int32)
        if self._drawn is None:
            return self._draw(logits, positions)
        tokens = mx.argmax(logits, axis=-1).astype(mx.int32)
        tokens[self._drawn] = self._draw(logits[self._drawn], positions[self._drawn])
        return tokens


class _Bias:
    """Adds each row's sparse logit_bias in one scatter."""

    def __init__(self, rows: Sequence[Sampling]) -> None:
        entries = [(index, token, value) for index, row in enumerate(rows) for token, value in row.logit_bias]
        self._rows = mx.array([index for index, _, _ in entries], dtype=mx.int32)
        self._tokens = mx.array([token for _, token, _ in entries], dtype=mx.int32)
        self._values = mx.array([value for _, _, value in entries], dtype=mx.float32)

    def __call__(self, logits: mx.array) -> mx.array:
        return logits.at[self._rows, self._tokens].add(self._values)


class _Draw:
    """Draws from each row's distribution: cut it by a probability threshold, then invert its cumulative sum."""

    def __init__(self, rows: Sequence[Sampling]) -> None:
        self._temperature = _column([row.temperature for row in rows])
        self._seeds = seeds(rows)
        self._min_p = _column([row.min_p for row in rows]) if any(row.min_p > 0 for row in rows) else None
        ranked = [index for index, row in enumerate(rows) if row.top_k > 0 or row.top_p < 1]
        self._rank = _Rank([rows[index] for index in ranked]) if ranked else None
        self._ranked = mx.array(ranked, dtype=mx.int32)

    def __call__(self, logits: mx.array, positions: mx.array) -> mx.array:
        weights = mx.softmax(logits / self._temperature, axis=-1)
        floor = self._floor(weights)
        if floor is not None:
            weights = mx.where(weights >= floor, weights, 0)
        cumulative = mx.cumsum(weights, axis=-1)
        target = uniform(self._seeds, positions)[:, None] * _BELOW_ONE * cumulative[:, -1:]
        return mx.sum(cumulative <= target, axis=-1).astype(mx.int32)

    def _floor(self, weights: mx.array) -> mx.array | None:
        """The smallest probability that each row keeps, or None when no row cuts."""
        floor = None
        if self._min_p is not None:
            floor = self._min_p * mx.max(weights, axis=-1, keepdims=True)
        if self._rank is not None:
            if floor is None:
                floor = mx.zeros((weights.shape[0], 1), dtype=mx.float32)
            floor[self._ranked] = mx.maximum(floor[self._ranked], self._rank(weights[self._ranked]))
        return floor


class _Rank:
    """The threshold of top-k and top-p, for the rows that use either: only these are sorted."""

    def __init__(self, rows: Sequence[Sampling]) -> None:
        self._top_k = mx.array([[row.top_k if row.top_k > 0 else 2**31 - 1] for row in rows], dtype=mx.int32)
        self._top_p = _column([row.top_p for row in rows])

    def __call__(self, weights: mx.array) -> mx.array:
        best = mx.sort(weights, axis=-1)[:, ::-1]
        kept = mx.where(mx.arange(best.shape[-1]) < self._top_k, best, 0)
        before = mx.cumsum(kept, axis=-1) - kept
        inside = (before < self._top_p * mx.sum(kept, axis=-1, keepdims=True)) & (kept > 0)
        last = mx.maximum(mx.sum(inside, axis=-1, keepdims=True) - 1, 0)
        return mx.take_along_axis(best, last, axis=-1)
