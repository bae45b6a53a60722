"""Reads block files on a thread of its own, so that the owner never waits for the disk."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from millstream.engine.prefix_cache.disk.block_file import DamagedFile, StoredRun
from millstream.engine.prefix_cache.disk.folder import DiskFolder, is_resource_shortage
from millstream.engine.prefix_cache.disk.index import Piece
from millstream.errors import EngineGone

log = logging.getLogger(__name__)

OnRead = Callable[[list[StoredRun] | None], None]
"""Called with the runs of all pieces, in order, or with None if one could not be read. Must not block."""


class DiskReader:
    """Calls the callback of each `read_soon` exactly once: on the reader's thread, or at once if that has ended.

    Threads meet here. Any thread queues reads under the condition's lock. The reader takes them under the lock and
    calls back without it, so a callback may queue another read. When the reader ends, it closes the queue and takes the
    remaining reads under the same lock, so no read can be queued for a thread that is gone.
    """

    def __init__(
        self, folder: DiskFolder, on_hits: Callable[[int], None], on_unusable: Callable[[str, bool], None]
    ) -> None:
        """`on_hits` gets the number of runs that were read. `on_unusable` gets the name of a file that is missing or
        damaged; True for damaged.
        """
        self._folder = folder
        self._on_hits = on_hits
        self._on_unusable = on_unusable
        self._changed = threading.Condition()
        self._queue: deque[tuple[Sequence[Piece], OnRead]] = deque()
        self._open = False
        self._thread = threading.Thread(target=self._run, name="prefix-reader", daemon=True)

    def start(self) -> None:
        self._open = True
        self._thread.start()

    def read_soon(self, pieces: Sequence[Piece], on_read: OnRead) -> None:
        with self._changed:
            if self._open:
                self._queue.append((pieces, on_read))
                self._changed.notify()
                return
        on_read(None)

    def close(self, timeout: float) -> bool:
        """End the thread; True if it has ended within `timeout` seconds. Queued reads get None."""
        with self._changed:
            self._open = False
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while (queued := self._next()) is not None:
                self._serve(*queued)
        finally:
            with self._changed:
                self._open = False
                remaining, self._queue = self._queue, deque()
            for _, on_read in remaining:
                _deliver(on_read, None)

    def _next(self) -> tuple[Sequence[Piece], OnRead] | None:
        with self._changed:
            while self._open and not self._queue:
                self._changed.wait()
            return self._queue.popleft() if self._open else None

    def _serve(self, pieces: Sequence[Piece], on_read: OnRead) -> None:
        runs: list[StoredRun] | None = None
        try:
            runs = self._read(pieces)
        finally:
            _deliver(on_read, runs)

    def _read(self, pieces: Sequence[Piece]) -> list[StoredRun] | None:
        runs: list[StoredRun] = []
        for piece in pieces:
            try:
                runs.append(self._folder.read(piece.name))
            except FileNotFoundError:
                self._on_unusable(piece.name, False)
                return None
            except (DamagedFile, OSError, MemoryError) as error:
                log.warning("cannot read %s in the prefix cache: %s", piece.name, error)
                if not is_resource_shortage(error):
                    self._on_unusable(piece.name, True)
                return None
        self._on_hits(len(runs))
        return runs


def _deliver(on_read: OnRead, runs: list[StoredRun] | None) -> None:
    try:
        on_read(runs)
    except EngineGone:
        log.debug("a prefix was read from disk after its engine had ended")
