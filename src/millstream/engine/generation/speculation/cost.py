"""What a pass costs by its rows and by its length: learned from steps as they happen."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable

REMEMBERED = 9
"""Passes of a kind whose median counts: others use the machine too, and the first of a kind compiles kernels."""
SLOPE = 0.05
"""What every further token of a pass is taken to cost, relative to a plain step, before any longer one was seen: an
optimist's guess, so that one is tried."""
SLOW = 1.3
"""The first pass of a kind that takes so many times as long as its tokens one by one is not believed: it has compiled
kernels or traced a graph. The second is."""


class StepCosts:
    """Seconds of a decode pass with some rows, each with 1 or more tokens. Rows are counted in powers of two."""

    def __init__(self, slope: float = SLOPE) -> None:
        self._slope = slope
        self._seen: dict[int, dict[int, deque[float]]] = {}
        """By bucket of rows, then by length."""
        self._medians: dict[int, dict[int, float]] = {}
        """Of these. Asked far more often than they change."""
        self._slow: set[tuple[int, int]] = set()
        """Bucket and length of passes that were not believed."""
        self.longest = 1
        """The longest pass that was seen, with any number of rows."""

    def observe(self, rows: int, length: int, seconds: float) -> bool:
        """A pass without prefill took so long. Returns whether that counts."""
        bucket = _bucket(rows)
        if length > 1 and not self.knows(rows, length) and (bucket, length) not in self._slow:
            plain = self.plain(rows)
            if plain is not None and seconds > SLOW * length * plain:
                self._slow.add((bucket, length))
                return False
        seen = self._seen.setdefault(bucket, {}).setdefault(length, deque(maxlen=REMEMBERED))
        seen.append(seconds)
        self._medians.setdefault(bucket, {})[length] = statistics.median(seen)
        self.longest = max(self.longest, length)
        return True

    def knows(self, rows: int, length: int) -> bool:
        return length in self._medians.get(_bucket(rows), ())

    def plain(self, rows: int) -> float | None:
        """Seconds of a plain step; None if there was none with about so many rows."""
        return self._medians.get(_bucket(rows), {}).get(1)

    def relative(self, rows: int, lengths: Iterable[int]) -> list[tuple[int, float]]:
        """What passes of these lengths cost, relative to a plain step of as many rows. What was never seen is read off
        the line between the lengths that were; beyond them, as if a further token cost very little: on a GPU the first
        costs as much as the next ten. With as many rows, else with the nearest number of rows."""
        bucket = _bucket(rows)
        for near in sorted(self._medians, key=lambda each: (abs(each - bucket), each)):
            known = self._medians[near]
            if 1 in known and len(known) > 1:
                plain = known[1]
                return [
                    (length, known[length] / plain if length in known else self._unseen(known, length))
                    for length in lengths
                ]
        return [(length, 1 + self._slope * (length - 1)) for length in lengths]

    def _unseen(self, known: dict[int, float], length: int) -> float:
        lengths = sorted(known)
        if length > lengths[-1]:
            return max(known[lengths[-1]] / known[1], 1.0) + self._slope * (length - lengths[-1])
        beyond = next(index for index, seen in enumerate(lengths) if seen > length)
        low, high = lengths[beyond - 1], lengths[beyond]
        slope = (known[high] - known[low]) / (high - low)
        return max((known[low] + slope * (length - low)) / known[1], 1.0)


def _bucket(rows: int) -> int:
    return (max(1, rows) - 1).bit_length()
