"""The heartbeat of an owner: written on its thread, read on any thread or in another process, so that hangs show."""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import time
from typing import IO, NamedTuple, Protocol

BEAT_EVERY = 1.0
"""Seconds between two beats of an idle owner, at most."""

_STEP, _BEAT = 0, 1
_SIZE = 16


class Cells(Protocol):
    """Two numbers, at the indices 0 and 1: a list, or shared memory."""

    def __getitem__(self, index: int, /) -> float: ...

    def __setitem__(self, index: int, value: float, /) -> None: ...


class Beat(NamedTuple):
    """What an owner wrote last. Both are CLOCK_MONOTONIC times, which all processes of a machine share."""

    step: float = 0.0
    """The start of the current step; 0 between steps."""
    last: float = 0.0
    """The last beat between steps; 0 until the model is loaded, since a load does not beat."""


class Heartbeat:
    """Only the owner writes it."""

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
    """A file that two processes map for a heartbeat: pass its descriptor to the child, then close it here. On no disk,
    where the system can: a full one must not keep an engine from starting."""
    file: IO[bytes]
    if sys.platform == "linux":
        file = os.fdopen(os.memfd_create("heartbeat"), "r+b")
    else:
        file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    file.write(bytes(_SIZE))
    file.flush()
    return file


def shared_heartbeat(descriptor: int) -> Heartbeat:
    """A heartbeat in memory that is shared with another process. The descriptor may be closed afterwards."""
    cells: Cells = memoryview(mmap.mmap(descriptor, _SIZE)).cast("d")
    return Heartbeat(cells)
