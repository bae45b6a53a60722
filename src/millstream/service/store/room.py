"""Whether the folders that a server writes to have room: what is full or read-only shows in `/health`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from pathlib import Path

LOOK_SECONDS = 5.0
"""Between two looks, at least: a disk that hangs holds one thread of the executor, and nobody else."""


class FolderRoom:
    """Use it on the event loop, which never waits for a disk."""

    def __init__(
        self,
        folders: Mapping[str, Path],
        has_room: Callable[[Path], bool],
        worker: Executor,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`folders`: by what a client is told if there is no room."""
        self._folders = folders
        self._has_room = has_room
        self._worker = worker
        self._clock = clock
        self._due = 0.0
        self._looking: Future[None] | None = None
        self._found: list[str] = []
        self.problems()

    def problems(self) -> list[str]:
        """What was found some seconds ago. Has the folders looked at again if that is due."""
        if self._clock() >= self._due and (self._looking is None or self._looking.done()):
            self._due = self._clock() + LOOK_SECONDS
            self._looking = self._worker.submit(self._look)
        return self._found

    def _look(self) -> None:
        self._found = [told for told, folder in self._folders.items() if not self._has_room(folder)]
