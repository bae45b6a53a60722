"""What a decode step costs, by its rows. Pure: it is told how long steps took.

The shape of the curve comes from the calibration; what is followed at run time is by how much steps differ from it. So
the cost is known for a number of rows that has not run yet: when streams start together, every step has more of them.
"""

from __future__ import annotations

from collections.abc import Sequence

_FOLLOWING = 0.1


class DecodeCost:
    """Seconds of a step that only decodes."""

    def __init__(self, steps: Sequence[tuple[int, float]] = ()) -> None:
        """`steps`: (rows, seconds) as they were measured, fewest rows first. Without, all steps count as one."""
        self._steps = [(1, 1.0)]
        self._factor: float | None = None
        """Seconds of a step, relative to the curve."""
        if steps:
            most = 0.0
            self._steps = [(rows, most := max(most, seconds)) for rows, seconds in steps]
            self._factor = 1.0

    @property
    def known(self) -> bool:
        return self._factor is not None

    def seconds(self, rows: int) -> float | None:
        return None if self._factor is None else self._factor * self._curve(rows)

    def observe(self, rows: int, seconds: float) -> None:
        seen = seconds / self._curve(rows)
        self._factor = seen if self._factor is None else self._factor + _FOLLOWING * (seen - self._factor)

    def _curve(self, rows: int) -> float:
        """Between two points that were measured and beyond the last one, on a line."""
        (low, least), *others = self._steps
        if rows <= low or not others:
            return least
        high, most = others[0]
        for point in others[1:]:
            if rows > high:
                (low, least), (high, most) = (high, most), point
        return least + (most - least) * (rows - low) / (high - low)
