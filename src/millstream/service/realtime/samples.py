"""Samples that arrive in pieces, addressed by their number since the begin of a stream."""

from __future__ import annotations

from collections import deque

import numpy as np

from millstream.speech_types import Samples


class SampleQueue:
    """Holds the newest samples of a stream. Its pieces are joined only when they are asked for."""

    def __init__(self, start: int = 0) -> None:
        self._pieces: deque[Samples] = deque()
        self.start = start
        self.end = start
        """The numbers of the first sample that is held, and of the next that comes."""

    def __len__(self) -> int:
        return self.end - self.start

    def append(self, samples: Samples) -> None:
        if len(samples):
            self._pieces.append(samples)
            self.end += len(samples)

    def drop_until(self, number: int) -> None:
        """Forget the samples before this one."""
        number = min(number, self.end)
        while self.start < number:
            first = self._pieces[0]
            count = min(len(first), number - self.start)
            if count == len(first):
                self._pieces.popleft()
            else:
                self._pieces[0] = first[count:]
            self.start += count

    def between(self, start: int, end: int) -> Samples:
        """A copy of the samples, as far as they are held."""
        found = []
        at = self.start
        for piece in self._pieces:
            low, high = max(start - at, 0), min(end - at, len(piece))
            if low < high:
                found.append(piece[low:high])
            at += len(piece)
        return np.concatenate(found) if found else np.zeros(0, np.float32)
