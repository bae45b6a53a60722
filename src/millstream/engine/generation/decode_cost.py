"""What a decode step costs, by its rows. Pure: it is told how long steps took.

The shape of the curve comes from the calibration. What is followed at run time is by how much steps differ from it, for
rows in powers of two. So the cost is known for a number of rows that has not run yet: when streams start together, each
step has more of them.
"""

from __future__ import annotations

from collections.abc import Sequence

_FOLLOWING = 0.1
_AT_FIRST = 0.5
"""While few steps of so many rows have run: the calibration may have had the time for few of them."""
_SURE = 4


class DecodeCost:
    """Seconds of a step that only decodes."""

    def __init__(self, steps: Sequence[tuple[int, float]] = ()) -> None:
        """`steps`: (rows, seconds) as they were measured, fewest rows first. Without, all steps count as one."""
        self._steps = [(1, 1.0)]
        self._factors: dict[int, float] = {}
        """Seconds of steps, relative to the curve, by the power of two of their rows."""
        self._seen: dict[int, tuple[int, float]] = {}
        """By the same: how many steps, and the last one."""
        self._default: float | None = None
        if steps:
            # More rows never cost less: what seems so was disturbed when it was measured.
            costs = [seconds for _, seconds in steps]
            self._steps = [(rows, min(costs[index:])) for index, (rows, _) in enumerate(steps)]
            self._default = 1.0

    @property
    def known(self) -> bool:
        return self._default is not None or bool(self._factors)

    def seconds(self, rows: int) -> float | None:
        factor = self._factor(rows.bit_length())
        return None if factor is None else factor * self._curve(rows)

    def observe(self, rows: int, seconds: float) -> None:
        """One slow step means nothing: it may have waited for a prefill pass that was launched before it."""
        seen, power = seconds / self._curve(rows), rows.bit_length()
        known, (count, last) = self._factor(power), self._seen.get(power, (0, self._default or seen))
        following = _FOLLOWING if count >= _SURE else _AT_FIRST
        self._seen[power] = (count + 1, seen)
        usual = min(seen, last)
        self._factors[power] = usual if known is None else known + following * (usual - known)

    def _factor(self, power: int) -> float | None:
        """Of steps that have not run yet: that of those with the next fewer rows, or else with the next more."""
        if (factor := self._factors.get(power)) is not None or not self._factors:
            return self._default if factor is None else factor
        return self._factors[min(self._factors, key=lambda each: (each > power, abs(each - power)))]

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
