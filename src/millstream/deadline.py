"""A moment that several waits share: one after the other, they take no longer than the first one may."""

from __future__ import annotations

import time


class Deadline:
    """`left` is made for the time-out of a wait."""

    __slots__ = ("_at",)

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds until then; 0 once it is over."""
        return max(0.0, self._at - time.monotonic())
