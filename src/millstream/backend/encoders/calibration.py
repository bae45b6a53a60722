"""Measures what a step of an encoder costs, and chooses how many tokens one may have. Owner only."""

from __future__ import annotations

import time
from collections.abc import Callable

STEP_SECONDS = 0.1
"""What a step should take at most: so long do a new request and a cancellation wait."""
MIN_TOKENS, MAX_TOKENS = 512, 65_536
DEFAULT = (8_192, 256)
"""Tokens per step and free tokens, where nothing is measured."""

Run = Callable[[int, int], None]
"""Computes so many rows of so many tokens, and waits for the result."""


def choose_sizes(run: Run, longest: int) -> tuple[int, int]:
    """Tokens per step, and tokens that cost no more than the fixed cost of a step."""
    length = min(64, longest)
    run(1, length)  # compiles
    fixed = min(_seconds(run, 1, min(8, longest)) for _ in range(3))
    rows = 8
    while True:
        run(rows, length)
        seconds = min(_seconds(run, rows, length) for _ in range(2))
        if seconds > STEP_SECONDS / 2 or rows * length >= MAX_TOKENS:
            break
        rows *= 4
    per_token = max(seconds - fixed, seconds / 10) / (rows * length)
    tokens = int((STEP_SECONDS - fixed) / per_token)
    return max(MIN_TOKENS, min(tokens, MAX_TOKENS)), min(int(fixed / per_token), MAX_TOKENS // 16)


def _seconds(run: Run, rows: int, length: int) -> float:
    started = time.perf_counter()
    run(rows, length)
    return time.perf_counter() - started
