"""What a step costs by its rows and by its length: learned from steps as they happen."""

from __future__ import annotations

KEEP = 0.8
"""The weight of what was known when a step is observed."""
OUTLIER = 3.0
"""A step that took so many times what is known counts as if it had taken just that: others use the machine too."""


class StepCosts:
    """Seconds of a decode step with some rows, each with 1 or more tokens.

    Rows are counted in powers of two. What was never seen is estimated from the nearest length that was, as if every
    further token cost `slope` of the first: an optimist's guess, so that longer steps are tried at all.
    """

    def __init__(self, slope: float = 0.05) -> None:
        self._slope = slope
        self._known: dict[tuple[int, int], float] = {}

    def observe(self, rows: int, length: int, seconds: float) -> None:
        """A step without prefill took so long."""
        key = (_bucket(rows), length)
        known = self._known.get(key)
        if known is None:
            self._known[key] = seconds
        else:
            self._known[key] = KEEP * known + (1 - KEEP) * min(seconds, OUTLIER * known)

    def knows(self, rows: int, length: int) -> bool:
        return (_bucket(rows), length) in self._known

    def seconds(self, rows: int, length: int) -> float | None:
        """None if no step with so many rows was seen."""
        bucket = _bucket(rows)
        if (known := self._known.get((bucket, length))) is not None:
            return known
        lengths = [seen for (of, seen) in self._known if of == bucket]
        if not lengths:
            return None
        nearest = min(lengths, key=lambda seen: (abs(seen - length), seen))
        share = (1 + self._slope * (length - 1)) / (1 + self._slope * (nearest - 1))
        return self._known[bucket, nearest] * share


def _bucket(rows: int) -> int:
    return (max(1, rows) - 1).bit_length()
