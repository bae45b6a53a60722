"""When the step under way began: written by the owner, read from any thread or process. What never ends shows here."""

from __future__ import annotations

import mmap
import tempfile
import time
from typing import IO, Protocol

_SIZE = 8


class Cell(Protocol):
    """Anything that keeps a number at place 0."""

    def __getitem__(self, place: int, /) -> float: ...

    def __setitem__(self, place: int, value: float, /) -> None: ...


class Pulse:
    """One number that only the owner writes. CLOCK_MONOTONIC is the same for all processes of a machine."""

    def __init__(self, cell: Cell | None = None) -> None:
        self._cell: Cell = [0.0] if cell is None else cell

    def begin(self) -> None:
        self._cell[0] = time.monotonic()

    def end(self) -> None:
        self._cell[0] = 0.0

    def age(self) -> float:
        """Seconds that the step under way has taken so far; 0 between steps."""
        began = self._cell[0]
        return max(0.0, time.monotonic() - began) if began else 0.0


def shared_file() -> IO[bytes]:
    """Memory for a pulse that two processes see: hand its descriptor to the child, and close it here after that."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    file.write(bytes(_SIZE))
    file.flush()
    return file


def shared_pulse(descriptor: int) -> Pulse:
    """A pulse in memory that another process has too. The descriptor may be closed afterwards."""
    numbers: Cell = memoryview(mmap.mmap(descriptor, _SIZE)).cast("d")
    return Pulse(numbers)
