"""What a pass costs by its rows and by its length: learned from steps as they happen."""

from __future__ import annotations

import statistics
from collections import deque

REMEMBERED = 9
"""Passes of a kind whose median counts: others use the machine too, and the first of a kind compiles kernels."""
SLOPE = 0.05
"""What every further token of a pass is taken to cost, relative to a plain step, before any longer one was seen: an
optimist's guess, so that one is tried."""


class StepCosts:
    """Seconds of a decode pass with some rows, each with 1 or more tokens. Rows are counted in powers of two."""

    def __init__(self, slope: float = SLOPE) -> None:
        self._slope = slope
        self._seen: dict[int, dict[int, deque[float]]] = {}
        """By bucket of rows, then by length."""

    def observe(self, rows: int, length: int, seconds: float) -> None:
        """A pass without prefill took so long."""
        lengths = self._seen.setdefault(_bucket(rows), {})
        lengths.setdefault(length, deque(maxlen=REMEMBERED)).append(seconds)

    def knows(self, rows: int, length: int) -> bool:
        return length in self._seen.get(_bucket(rows), {})

    @property
    def longest(self) -> int:
        """The longest pass that was seen, with any number of rows."""
        return max((length for lengths in self._seen.values() for length in lengths), default=1)

    def plain(self, rows: int) -> float | None:
        """Seconds of a plain step; None if there was none with about so many rows."""
        seen = self._seen.get(_bucket(rows), {}).get(1)
        return statistics.median(seen) if seen else None

    def relative(self, rows: int, length: int) -> float:
        """What a pass costs relative to a plain step of as many rows. What was never seen is read off the line between
        the lengths that were; with as many rows, else with the nearest number of rows."""
        bucket = _bucket(rows)
        for near in sorted(self._seen, key=lambda each: (abs(each - bucket), each)):
            known = self._ratios(near)
            if len(known) > 1:
                return _on_line(known, length)
        return 1 + self._slope * (length - 1)

    def _ratios(self, bucket: int) -> list[tuple[int, float]]:
        """The lengths that were seen and what they cost, shortest first; none without a plain step."""
        lengths = self._seen[bucket]
        if 1 not in lengths:
            return []
        plain = statistics.median(lengths[1])
        return [(length, statistics.median(lengths[length]) / plain) for length in sorted(lengths)]


def _bucket(rows: int) -> int:
    return (max(1, rows) - 1).bit_length()


def _on_line(known: list[tuple[int, float]], length: int) -> float:
    """Between the two points around it, or beyond the last two."""
    beyond = next((index for index, (seen, _) in enumerate(known) if seen >= length), len(known) - 1)
    (low, low_cost), (high, high_cost) = known[max(0, beyond - 1)], known[max(1, beyond)]
    slope = (high_cost - low_cost) / (high - low)
    return max(low_cost + slope * (length - low), 1.0)
