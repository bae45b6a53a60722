"""Pooling against NumPy, row by row without padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from millstream.backend.encoders.pooling import normalize, pool
from millstream.models.encoder_layout import POOLING_MODES

LENGTHS = [7, 1, 4]
EXPECTED: dict[str, Callable[[Any], Any]] = {
    "cls": lambda row: row[0],
    "last": lambda row: row[-1],
    "max": lambda row: row.max(0),
    "mean": lambda row: row.mean(0),
    "mean_sqrt_len": lambda row: row.sum(0) / np.sqrt(len(row)),
    "weighted_mean": lambda row: np.average(row, axis=0, weights=np.arange(1, len(row) + 1)),
}


@pytest.fixture
def hidden() -> Any:
    values = np.random.default_rng(0).normal(size=(3, 7, 5)).astype(np.float32)
    for row, length in enumerate(LENGTHS):
        values[row, length:] = 1e6  # padding must not count
    return values


def test_every_mode_is_tested() -> None:
    assert set(EXPECTED) == set(POOLING_MODES.values())


@pytest.mark.parametrize("mode", EXPECTED)
def test_modes(mode: str, hidden: Any) -> None:
    pooled = np.asarray(pool(mx.array(hidden), mx.array(LENGTHS), [mode]))
    expected = [EXPECTED[mode](row[:length]) for row, length in zip(hidden, LENGTHS, strict=True)]
    np.testing.assert_allclose(pooled, expected, atol=1e-5)


def test_several_modes_are_put_side_by_side(hidden: Any) -> None:
    pooled = np.asarray(pool(mx.array(hidden), mx.array(LENGTHS), ["cls", "max"]))
    assert pooled.shape == (3, 10)
    np.testing.assert_allclose(pooled[2], [*hidden[2, 0], *hidden[2, :4].max(0)], atol=1e-6)


def test_sums_of_half_precision_are_in_single() -> None:
    ones = mx.full((1, 5000, 2), 10.0, mx.float16)
    pooled = pool(ones, mx.array([5000]), ["mean_sqrt_len"])
    assert pooled.dtype == mx.float32
    np.testing.assert_allclose(np.asarray(pooled), 10 * np.sqrt(5000), rtol=1e-5)


def test_vectors_of_zeros_stay_zeros() -> None:
    vectors = np.asarray(normalize(mx.array([[3.0, 4.0], [0.0, 0.0]])))
    np.testing.assert_allclose(vectors, [[0.6, 0.8], [0, 0]], atol=1e-6)
