"""The inputs of the embedding benchmarks: words of mixed, short or long texts."""

from __future__ import annotations

import random
from collections.abc import Callable

from millstream.bench.words import words

MIXES: dict[str, Callable[[random.Random], int]] = {
    "mixed": lambda draw: min(200, 4 + int(draw.lognormvariate(2.8, 1.0))),
    "short": lambda draw: draw.randint(4, 12),
    "long": lambda draw: draw.randint(120, 200),
    "full": lambda draw: draw.randint(400, 500),
}
"""Words per input."""


def lengths(mix: str, count: int, seed: int) -> list[int]:
    draw = random.Random(f"{mix} {count} {seed}")
    return [MIXES[mix](draw) for _ in range(count)]


def inputs(mix: str, count: int, seed: int) -> list[str]:
    draw = random.Random(f"{mix} {count} {seed}")
    return [words(draw, MIXES[mix](draw)) for _ in range(count)]
