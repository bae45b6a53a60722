"""The thread that reads block files, so that an owner never waits for a disk."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from millstream.engine.prefix_cache.disk.block_file import DamagedFile, StoredRun
from millstream.engine.prefix_cache.disk.folder import DiskFolder, not_its_fault
from millstream.engine.prefix_cache.disk.index import Piece
from millstream.errors import EngineGone

log = logging.getLogger(__name__)

Done = Callable[[list[StoredRun] | None], None]
"""Takes the runs of all pieces, in their order, or None if one of them is not there. Must not block."""


class DiskReader:
    """`ask_soon` is answered exactly once, whatever happens: by the reader, or at once if there is no reader any more.

    Threads meet here: any thread asks, under the condition's lock; the reader takes questions under it and answers
    without it, so an answer may ask again. That the reader ends is said under the same lock under which its last
    questions are taken away, so none can be asked of a thread that is gone.
    """

    def __init__(self, folder: DiskFolder, on_read: Callable[[int], None], on_bad: Callable[[str, bool], None]) -> None:
        """`on_read` hears how many runs were read, `on_bad` of a file that is gone or (true) damaged."""
        self._folder = folder
        self._on_read = on_read
        self._on_bad = on_bad
        self._changed = threading.Condition()
        self._questions: deque[tuple[Sequence[Piece], Done]] = deque()
        self._open = False
        self._thread = threading.Thread(target=self._run, name="prefix-reader", daemon=True)

    def start(self) -> None:
        self._open = True
        self._thread.start()

    def ask_soon(self, pieces: Sequence[Piece], done: Done) -> None:
        with self._changed:
            if self._open:
                self._questions.append((pieces, done))
                self._changed.notify()
                return
        done(None)

    def close(self, wait: float) -> bool:
        """Whether the thread has ended. What is still asked is answered with None."""
        with self._changed:
            self._open = False
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(wait)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while (question := self._next()) is not None:
                self._answer(*question)
        finally:
            with self._changed:
                self._open = False
                left, self._questions = self._questions, deque()
            for _, done in left:
                _tell(done, None)

    def _next(self) -> tuple[Sequence[Piece], Done] | None:
        with self._changed:
            while self._open and not self._questions:
                self._changed.wait()
            return self._questions.popleft() if self._open else None

    def _answer(self, pieces: Sequence[Piece], done: Done) -> None:
        runs: list[StoredRun] | None = None
        try:
            runs = self._read(pieces)
        finally:
            _tell(done, runs)

    def _read(self, pieces: Sequence[Piece]) -> list[StoredRun] | None:
        runs: list[StoredRun] = []
        for piece in pieces:
            try:
                runs.append(self._folder.read(piece.name))
            except FileNotFoundError:
                self._on_bad(piece.name, False)
                return None
            except (DamagedFile, OSError, MemoryError) as error:
                log.warning("%s in the prefix cache cannot be read: %s", piece.name, error)
                if not not_its_fault(error):
                    self._on_bad(piece.name, True)
                return None
        self._on_read(len(runs))
        return runs


def _tell(done: Done, runs: list[StoredRun] | None) -> None:
    try:
        done(runs)
    except EngineGone:
        log.debug("what was read from the prefix cache comes too late: its engine has ended")
