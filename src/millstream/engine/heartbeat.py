"""The heartbeat of an owner: written by its thread, read from any thread or process. A hang shows here."""

from __future__ import annotations

import mmap
import tempfile
import time
from typing import IO, NamedTuple, Protocol

BEAT_EVERY = 1.0
"""Seconds: an idle owner gives a sign of life at least this often."""

_STEP, _BEAT = 0, 1
_SIZE = 16


class Cells(Protocol):
    """Anything that keeps a number at places 0 and 1."""

    def __getitem__(self, place: int, /) -> float: ...

    def __setitem__(self, place: int, value: float, /) -> None: ...


class Beat(NamedTuple):
    """What an owner last wrote. Both are times of CLOCK_MONOTONIC, which is the same for all processes of a machine."""

    step: float = 0.0
    """When the step under way began; 0 between steps."""
    last: float = 0.0
    """The last sign of life between steps; 0 before the model is loaded, when none is due."""


class Heartbeat:
    """Two numbers that only the owner writes."""

    def __init__(self, cells: Cells | None = None) -> None:
        self._cells: Cells = [0.0, 0.0] if cells is None else cells

    def begin_step(self) -> None:
        self._cells[_STEP] = time.monotonic()

    def end_step(self) -> None:
        self.beat()  # first: a reader that finds no step must find a fresh beat
        self._cells[_STEP] = 0.0

    def beat(self) -> None:
        self._cells[_BEAT] = time.monotonic()

    def read(self) -> Beat:
        step = self._cells[_STEP]
        return Beat(step, self._cells[_BEAT])


def shared_file() -> IO[bytes]:
    """Memory for a heartbeat that two processes see: hand its descriptor to the child, and close it here after that."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    file.write(bytes(_SIZE))
    file.flush()
    return file


def shared_heartbeat(descriptor: int) -> Heartbeat:
    """A heartbeat in memory that another process has too. The descriptor may be closed afterwards."""
    numbers: Cells = memoryview(mmap.mmap(descriptor, _SIZE)).cast("d")
    return Heartbeat(numbers)
