"""The progress of a download as people read it: bytes, speed, time left."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from millstream.models.sizes import size_text

WINDOW_SECONDS = 10.0
"""The speed is that of the last seconds."""


class Transfer:
    """Follows the bytes of one download."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._samples: deque[tuple[float, int]] = deque()
        self.done = self.total = 0

    def update(self, done: int, total: int) -> None:
        self.done, self.total = done, total
        now = self._now()
        self._samples.append((now, done))
        while len(self._samples) > 2 and self._samples[0][0] < now - WINDOW_SECONDS:
            self._samples.popleft()

    @property
    def speed(self) -> float:
        """Bytes per second; 0 if it is not known yet, or if nothing comes."""
        if len(self._samples) < 2:
            return 0.0
        (first, before), (last, after) = self._samples[0], self._samples[-1]
        return max(0.0, (after - before) / (last - first)) if last > first else 0.0

    @property
    def text(self) -> str:
        """`1.2 GB of 4.5 GB, 26 %, 38.0 MB/s, 1 min 30 s left`."""
        if not self.total:
            return size_text(self.done)
        share = f"{size_text(self.done)} of {size_text(self.total)}, {100 * self.done // self.total} %"
        speed = self.speed
        if not speed or self.done >= self.total:
            return share
        return f"{share}, {size_text(speed)}/s, {duration_text((self.total - self.done) / speed)} left"


def duration_text(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
    return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:.0f} min"
