"""One vectorised sampler for all rows of a batch, each with its own settings.

The order is that of OpenAI and Hugging Face: bias, penalties, temperature, then top-k, top-p and min-p. A row's token
depends only on its own logits, settings, seed and position, so the same seed gives the same text in any batch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from millstream.backend.kernels import sample as sample_kernel
from millstream.backend.kernels.outbox import Letter
from millstream.backend.layers.vector_math import exp_is_scalar, exp_of_difference
from millstream.types import Sampling

MANY_SORTED = 16_384
"""Probabilities that a CPU sorts by NumPy. MLX takes 60 ns for each, NumPy 4 to 10; but the host waits for them,
and prepares no step meanwhile."""

LARGE_VOCABULARY = 4096
"""From here on the softmax of an x86_64 CPU is ours."""

_NEVER = 2**62

# Scales u in [0, 1), so that u * total stays below the total after rounding.
_BELOW_ONE = 1.0 - 1e-6


def _column(values: list[float]) -> mx.array:
    return mx.array(values, dtype=mx.float32)[:, None]


GREEDY = Sampling()


def drawing(sampling: Sampling) -> Sampling:
    """What of a row's settings a sampler sees. All greedy rows are alike, so a sampler of them serves others too."""
    return GREEDY if sampling.greedy and not sampling.logit_bias else sampling


def _seeds(rows: Sequence[Sampling]) -> NDArray[np.uint32]:
    return np.array([(row.seed ^ (row.seed >> 32)) & 0xFFFFFFFF for row in rows], dtype=np.uint32)


def seeds(rows: Sequence[Sampling]) -> mx.array:
    return mx.array(_seeds(rows))


def uniform(row_seeds: mx.array, positions: mx.array) -> mx.array:
    """One number in [0, 1) per row, a function of (seed, position) alone: the pair is the generator's key."""
    keys = mx.stack([row_seeds, positions.astype(mx.uint32)], axis=1)
    numbers: mx.array = mx.vmap(lambda key: mx.random.uniform(key=key))(keys)
    return numbers


class Sampler:
    """Samples one token per row. Built when rows join or leave, called every step; has no state of its own."""

    def __init__(self, rows: Sequence[Sampling], *, kernel: bool = False) -> None:
        """`kernel`: sample with our CUDA kernel."""
        self._rows = rows
        self._bias = _Bias(rows) if any(row.logit_bias for row in rows) else None
        self._settings: mx.array | None = None
        if kernel:
            settings = sample_kernel.numbers_of(rows)
            self._made = mx.array(np.concatenate([settings.reshape(-1).view(np.uint32), _seeds(rows)]))
            # What the device has computed lies in its own memory, if the other is held. From the host's, every block
            # reads over the bus.
            far = self._made + mx.array(0, dtype=mx.uint32)
            self._settings = mx.view(far[: settings.size], mx.float32).reshape(settings.shape)
            self._seeds = far[settings.size :]

    @property
    def arrays(self) -> list[mx.array]:
        """What the kernel reads in every step."""
        return [] if self._settings is None else [self._settings, self._seeds]

    @property
    def by_kernel(self) -> bool:
        return self._settings is not None

    def step(self, logits: mx.array, positions: mx.array, letter: Letter | None = None) -> tuple[mx.array, mx.array]:
        """The tokens, and the positions of the next step. `logits` (rows, vocabulary) after penalties; `positions`
        (rows,) counts each row's output tokens. `letter`: if sampled by the kernel, where it tells the host."""
        if self._settings is None or not logits.shape[0]:
            return self(logits, positions), positions + 1
        if self._bias is not None:
            logits = self._bias(logits.astype(mx.float32))
        return sample_kernel.sample(logits, self._settings, self._seeds, positions, letter)

    def __call__(self, logits: mx.array, positions: mx.array) -> mx.array:
        """The tokens by MLX's operations: the reference for the kernel."""
        if self._bias is not None:
            logits = self._bias(logits.astype(mx.float32))
        random, chosen = self._random
        if random is None:  # in the type that they have: to convert them changes no order
            return mx.argmax(logits, axis=-1).astype(mx.int32)
        logits = logits.astype(mx.float32)
        if chosen is None:
            return random(logits, positions)
        tokens = mx.argmax(logits, axis=-1).astype(mx.int32)
        tokens[chosen] = random(logits[chosen], positions[chosen])
        return tokens

    @functools.cached_property
    def _random(self) -> tuple[_RandomSampler | None, mx.array | None]:
        """For rows that draw, and which they are; None if that is all."""
        rows = [index for index, row in enumerate(self._rows) if not row.greedy]
        if not rows:
            return None, None
        chosen = None if len(rows) == len(self._rows) else mx.array(rows, dtype=mx.int32)
        return _RandomSampler([self._rows[index] for index in rows]), chosen


class _Bias:
    """Adds each row's sparse logit_bias in one scatter."""

    def __init__(self, rows: Sequence[Sampling]) -> None:
        entries = [(index, token, value) for index, row in enumerate(rows) for token, value in row.logit_bias]
        self._rows = mx.array([index for index, _, _ in entries], dtype=mx.int32)
        self._tokens = mx.array([token for _, token, _ in entries], dtype=mx.int32)
        self._values = mx.array([value for _, _, value in entries], dtype=mx.float32)

    def __call__(self, logits: mx.array) -> mx.array:
        return logits.at[self._rows, self._tokens].add(self._values)


class _RandomSampler:
    """Samples from each row's distribution: applies a probability threshold, then inverts the cumulative sum."""

    def __init__(self, rows: Sequence[Sampling]) -> None:
        self._temperature = _column([row.temperature for row in rows])
        self._seeds = seeds(rows)
        self._min_p = _column([row.min_p for row in rows]) if any(row.min_p > 0 for row in rows) else None
        sorted_rows = [index for index, row in enumerate(rows) if row.top_k > 0 or row.top_p < 1]
        self._top_k_top_p = _TopKTopP([rows[index] for index in sorted_rows]) if sorted_rows else None
        self._sorted_rows = mx.array(sorted_rows, dtype=mx.int32)

    def __call__(self, logits: mx.array, positions: mx.array) -> mx.array:
        probs = _softmax(logits / self._temperature)
        threshold = self._threshold(probs)
        if threshold is not None:
            probs = mx.where(probs >= threshold, probs, 0)
        cumulative = mx.cumsum(probs, axis=-1)
        target = uniform(self._seeds, positions)[:, None] * _BELOW_ONE * cumulative[:, -1:]
        return mx.sum(cumulative <= target, axis=-1).astype(mx.int32)

    def _threshold(self, probs: mx.array) -> mx.array | None:
        """The probability below which each row discards tokens, or None if no row has a threshold."""
        threshold = None
        if self._min_p is not None:
            threshold = self._min_p * mx.max(probs, axis=-1, keepdims=True)
        if self._top_k_top_p is not None:
            if threshold is None:
                threshold = mx.zeros((probs.shape[0], 1), dtype=mx.float32)
            threshold[self._sorted_rows] = mx.maximum(
                threshold[self._sorted_rows], self._top_k_top_p(probs[self._sorted_rows])
            )
        return threshold


class _TopKTopP:
    """The threshold of top-k and top-p, for the rows that use either: only these are sorted."""

    def __init__(self, rows: Sequence[Sampling]) -> None:
        self._top_k = mx.array([[row.top_k if row.top_k > 0 else 2**31 - 1] for row in rows], dtype=mx.int32)
        self._top_p = _column([row.top_p for row in rows])

    def __call__(self, probs: mx.array) -> mx.array:
        best = _descending(probs)
        # Tokens as likely as the k-th belong to the top k as well: there is no order among them.
        kth = mx.take_along_axis(best, mx.minimum(self._top_k, best.shape[-1]) - 1, axis=-1)
        in_top_k = mx.where(best >= kth, best, 0)
        before = mx.cumsum(in_top_k, axis=-1) - in_top_k
        inside = (before < self._top_p * mx.sum(in_top_k, axis=-1, keepdims=True)) & (in_top_k > 0)
        last = mx.maximum(mx.sum(inside, axis=-1, keepdims=True) - 1, 0)
        return mx.take_along_axis(best, last, axis=-1)


def _on_cpu() -> bool:
    return mx.default_device() == mx.Device(mx.DeviceType.cpu, 0)


def _descending(probs: mx.array) -> mx.array:
    """Each row's probabilities, the largest first."""
    if probs.size < MANY_SORTED or not _on_cpu():
        return mx.sort(probs, axis=-1)[:, ::-1]
    mx.eval(probs)
    return mx.array(np.sort(np.array(probs, copy=False), axis=-1))[:, ::-1]


def _softmax(scores: mx.array) -> mx.array:
    """By the size of the vocabulary alone, so that a row gets the same numbers in every batch."""
    if scores.shape[-1] < LARGE_VOCABULARY or not exp_is_scalar() or not _on_cpu():
        return mx.softmax(scores, axis=-1)
    top = mx.max(scores, axis=-1, keepdims=True)
    weights = _without_tiny(exp_of_difference(scores, top, _NEVER), scores, top)
    return weights / mx.sum(weights, axis=-1, keepdims=True)


# Tokens that are forbidden, minus infinity, have to get 0. The exponential ends at 2**-126.
_without_tiny = mx.compile(lambda weights, x, top: mx.where(x - top > -87.0, weights, 0), shapeless=True)
