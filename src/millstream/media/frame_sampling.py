"""Which frames of a video are looked at. Imports no library for pictures: the child that decodes needs none."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FrameSampling:
    a_second: float = 2.0
    fewest: int = 4
    most: int = 64


def chosen(ends: list[float], pace: FrameSampling) -> list[int]:
    """Which frames to look at, from when each of them ends: at even times, each at most once."""
    count = max(1, min(len(ends), pace.most, max(pace.fewest, round(ends[-1] * pace.a_second))))
    times = [ends[-1] * number / count for number in range(count)]
    return sorted({min(bisect_right(ends, time + 1e-9), len(ends) - 1) for time in times})
