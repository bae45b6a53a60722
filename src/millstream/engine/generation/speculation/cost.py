"""What a pass costs by its rows and by its length: measured at load, then learned from steps as they happen."""

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

    def __init__(
        self,
        slope: float = SLOPE,
        *,
        steps: Iterable[tuple[int, float]] = (),
        verifying: Iterable[tuple[int, int, float]] = (),
    ) -> None:
        """`steps`, `verifying`: what the calibration measured, see `model_facts.Calibration`."""
        self._slope = slope
        self._seen: dict[int, dict[int, deque[float]]] = {}
        """By bucket of rows, then by length."""
        self._medians: dict[int, dict[int, float]] = {}
        """Of these. Asked far more often than they change."""
        self._slow: set[tuple[int, int]] = set()
        """Bucket and length of passes that were not believed."""
        self.longest = 1
        """The longest pass that was seen, with any number of rows."""
        self._measured: dict[int, dict[int, float]] = {}
        """What the load found, by bucket and length: relative to its own plain steps, since all that it measured was
        short of context, and slow if the machine was busy."""
        self._begin(dict(steps), verifying)

    def _begin(self, steps: dict[int, float], verifying: Iterable[tuple[int, int, float]]) -> None:
        for rows, seconds in steps.items():
            self.observe(rows, 1, seconds)
        most: dict[int, float] = {}
        # A shorter pass never costs more: what seems so was the first of its kind, or was disturbed.
        for rows, length, seconds in sorted(verifying, key=lambda each: -each[1]):
            if rows not in steps:
                continue
            most[rows] = min(seconds, most.get(rows, seconds))
            self._measured.setdefault(_bucket(rows), {})[length] = most[rows] / steps[rows]
            self.longest = max(self.longest, length)

    def observe(self, rows: int, length: int, seconds: float) -> bool:
        """A pass without prefill took so long. Returns whether that counts."""
        bucket = _bucket(rows)
        if length > 1 and not self.knows(rows, length) and (bucket, length) not in self._slow:
            plain = self.plain(rows)
            if plain is not None and seconds > SLOW * length * plain:
                self._slow.add((bucket, length))
                return False
        lengths = self._seen.setdefault(bucket, {})
        if (seen := lengths.get(length)) is None:
            seen = lengths[length] = deque(maxlen=REMEMBERED)
            if (measured := self._measured.get(bucket, {}).get(length)) and (plain := self.plain(rows)):
                seen.append(measured * plain)  # it counts as one of them
        seen.append(seconds)
        self._medians.setdefault(bucket, {})[length] = statistics.median(seen)
        self.longest = max(self.longest, length)
        return True

    def knows(self, rows: int, length: int) -> bool:
        bucket = _bucket(rows)
        return length in self._medians.get(bucket, ()) or length in self._measured.get(bucket, ())

    def plain(self, rows: int) -> float | None:
        """Seconds of a plain step; None if there was none with about so many rows."""
        return self._medians.get(_bucket(rows), {}).get(1)

    def relative(self, rows: int, lengths: Iterable[int]) -> list[tuple[int, float]]:
        """What passes of these lengths cost, relative to a plain step of as many rows. What was never seen is read off
        the line between the lengths that were; beyond them, as if a further token cost very little: on a GPU the first
        costs as much as the next ten. With as many rows, else with the nearest number of rows."""
        bucket = _bucket(rows)
        buckets = self._medians.keys() | self._measured.keys()
        for near in sorted(buckets, key=lambda each: (abs(each - bucket), each)):
            known = self._known(near)
            if len(known) > 1:
                return [
                    (length, known[length] if length in known else self._unseen(known, length)) for length in lengths
                ]
        return [(length, 1 + self._slope * (length - 1)) for length in lengths]

    def _known(self, bucket: int) -> dict[int, float]:
        """By length, relative to a plain step: as it was seen, else as it was measured at load."""
        known = {1: 1.0, **self._measured.get(bucket, {})}
        seen = self._medians.get(bucket, {})
        if (plain := seen.get(1)) is not None:
            known.update((length, seconds / plain) for length, seconds in seen.items())
        return known

    def _unseen(self, known: dict[int, float], length: int) -> float:
        lengths = sorted(known)
        if length > lengths[-1]:
            return max(known[lengths[-1]], 1.0) + self._slope * (length - lengths[-1])
        beyond = next(index for index, seen in enumerate(lengths) if seen > length)
        low, high = lengths[beyond - 1], lengths[beyond]
        slope = (known[high] - known[low]) / (high - low)
        return max(known[low] + slope * (length - low), 1.0)


def _bucket(rows: int) -> int:
    return (max(1, rows) - 1).bit_length()
