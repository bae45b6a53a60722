"""Every combination of sampling settings, with numbers to draw by: for holding a sampling kernel to the reference."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np

from millstream.backend.generation.sampling.sampler import Sampler, seeds, uniform
from millstream.types import Sampling

TEMPERATURES = (0.0, 0.7, 1.6)
TOP_K = (0, 1, 4, 50)
TOP_P = (1.0, 0.9, 0.6)
MIN_P = (0.0, 0.1, 0.35)
WEIGHTS = (0.3, 0.07, 1.0, 0.2, 0.5, 0.02, 0.11)
"""Of the tokens at temperature 1: far enough apart that no rounding moves a threshold over one of them."""
TARGETS = (0.01, 0.4, 0.7, 0.99)
"""Numbers in [0, 1) to draw by: another set of tokens gives another token for at least one of them."""


def combinations() -> list[Sampling]:
    settings = itertools.product(TEMPERATURES, TOP_K, TOP_P, MIN_P)
    return [Sampling(temperature=t, top_k=k, top_p=p, min_p=m, seed=7) for t, k, p, m in settings]


def spread_positions(row: Sampling) -> list[int]:
    """Positions whose numbers, for the seed of this row, are nearest to TARGETS."""
    candidates = mx.arange(400)
    numbers = np.array(uniform(seeds([row] * 400), candidates))
    return [int(np.abs(numbers - target).argmin()) for target in TARGETS]


def grid(weights: tuple[float, ...] = WEIGHTS) -> tuple[list[Sampling], mx.array, mx.array]:
    """Rows of every combination at every position: their settings, logits and positions."""
    rows = combinations()
    positions = spread_positions(rows[0])  # one seed for all rows
    every = [row for row in rows for _ in positions]
    logits = mx.broadcast_to(mx.log(mx.array(weights)), (len(every), len(weights)))
    return every, mx.contiguous(logits), mx.array(positions * len(rows))


def reference_tokens(rows: list[Sampling], logits: mx.array, positions: mx.array) -> list[int]:
    tokens: list[int] = Sampler(rows)(logits, positions).tolist()  # type: ignore[assignment]
    return tokens


def describe(row: Sampling) -> str:
    return f"temperature {row.temperature}, top_k {row.top_k}, top_p {row.top_p}, min_p {row.min_p}"


def disagreements(rows: list[Sampling], got: list[int], expected: list[int]) -> list[str]:
    """The settings under which tokens differ, each once."""
    pairs = zip(rows, got, expected, strict=True)
    return sorted({describe(row) for row, one, other in pairs if one != other})
