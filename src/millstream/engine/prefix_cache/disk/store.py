"""The prefix cache's disk tier: runs of blocks in files, within a budget, written and read off the owner thread."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from millstream.engine.prefix_cache.disk.block_file import StoredRun, pack
from millstream.engine.prefix_cache.disk.folder import DiskFolder, WriteFile, bytes_on_disk, file_name, write_file
from millstream.engine.prefix_cache.disk.index import DiskIndex, Piece
from millstream.engine.prefix_cache.disk.reader import DiskReader, Done

log = logging.getLogger(__name__)

QUEUE_BYTES = 256 << 20
GRACE = 1.0
"""Seconds for a write that is under way when there is no time left."""


@dataclass(frozen=True, slots=True)
class DiskStats:
    """Figures since `open`, but for the first two."""

    bytes: int
    files: int
    hits: int
    """Runs that were read."""
    written: int
    dropped: int
    """Runs that were not written: the queue was full, or the budget too small."""
    failed: int
    """Runs that could not be written."""
    damaged: int
    """Files that were removed because they could not be used."""


@dataclass(frozen=True, slots=True)
class _Job:
    run: StoredRun
    keys: tuple[str, ...]
    era: int


class DiskStore:
    """For one owner thread, which never waits for a disk here, but in `open` and `close`. Opened and closed once.

    A folder is one stamp's alone: what is in it of another model or version is removed.

    Threads meet in this object: the owner asks and orders, the writer alone changes the folder, and the reader reports
    files that are no good. All that they share is under the condition's lock, and no file is touched while it is held.
    Because only the writer adds files, the room that it makes is still there when it writes. Nothing else is promised:
    a file that `match` has named may be gone when it is read, and that is a miss.
    """

    def __init__(
        self, folder: Path, budget: int, stamp: str, *, queue_bytes: int = QUEUE_BYTES, write: WriteFile = write_file
    ) -> None:
        self._stamp = stamp
        self._queue_bytes = queue_bytes
        self._folder = DiskFolder(folder, stamp, write)
        self._reader = DiskReader(self._folder, self._was_read, self._is_bad)
        self._writer = threading.Thread(target=self._run, name="prefix-writer", daemon=True)
        self._last_touch = 0
        self._complained = False
        self._stuck = False
        self._changed = threading.Condition()
        # Under the lock from here on.
        self._index = DiskIndex(budget)
        self._counts: Counter[str] = Counter()
        self._open = False
        self._jobs: deque[_Job] = deque()
        self._queued = 0
        self._coming: Counter[str] = Counter()
        self._doomed: list[str] = []
        self._touched: dict[str, None] = {}
        self._era = 0

    def open(self) -> None:
        """Take the folder and learn what is in it. Raises StoreBusy, or OSError if it cannot be used."""
        self._folder.acquire()
        try:
            found, damaged = self._folder.scan()
            for file in found:
                self._index.add(file.keys, file.name, file.size, file.parent)
            self._counts["damaged"] += len(damaged)
            for name in [*damaged, *(self._index.evict_for(0) or ())]:
                self._remove(name)
        except BaseException:
            self._folder.release()
            raise
        self._open = True
        self._writer.start()
        self._reader.start()

    def match(self, keys: Sequence[str]) -> tuple[Piece, ...]:
        """The longest beginning of a chain that is on disk. That counts as a use."""
        with self._changed:
            pieces = self._index.match(keys)
            self._touch(self._index.touch(piece.name for piece in pieces))
        return pieces

    def find_first(self, keys: Sequence[str]) -> tuple[int, Piece] | None:
        """A file that ends with one of these keys, whatever it stands on: a checkpoint. The number of the first key
        that has one, and the file. That counts as a use."""
        with self._changed:
            for number, key in enumerate(keys):
                if (piece := self._index.find(key)) is not None:
                    self._touch(self._index.touch([piece.name]))
                    return number, piece
        return None

    def holds_all(self, keys: Sequence[str]) -> bool:
        """Whether blocks are on disk or wait to be written, so that nobody need copy them again."""
        with self._changed:
            return all(self._index.holds(key) or key in self._coming for key in keys)

    def write_soon(self, run: StoredRun, keys: Sequence[str]) -> None:
        """To be found once it is on disk. `keys` are the run's own, which the caller has anyway."""
        name = file_name(keys)
        with self._changed:
            if name in self._index or self._coming[name]:
                self._touch(self._index.touch([*self._index.lineage(run.parent), name]))
            elif not self._open or self._queued + run.data_bytes > self._queue_bytes:
                self._counts["dropped"] += 1
            else:
                self._jobs.append(_Job(run, tuple(keys), self._era))
                self._queued += run.data_bytes
                self._coming.update([name, *keys])
                self._changed.notify()

    def read_soon(self, pieces: Sequence[Piece], done: Done) -> None:
        """`done` gets the whole runs of the pieces, on the reader's thread, or None; at once if the store is closed."""
        self._reader.ask_soon(tuple(pieces), done)

    def clear(self) -> None:
        """Forget everything, also what waits to be written. The files go off this thread."""
        with self._changed:
            self._era += 1
            self._drop_jobs()
            self._touched.clear()
            self._doomed += self._index.clear()
            self._changed.notify()

    def close(self, wait: float) -> None:
        """Write what is queued, for at most `wait` seconds, and give the folder back."""
        until = time.monotonic() + wait
        with self._changed:
            self._open = False
            self._changed.notify()
        if self._writer.ident is None:
            return
        self._writer.join(wait)
        with self._changed:
            self._counts["dropped"] += self._drop_jobs()
        self._writer.join(GRACE)
        read = self._reader.close(max(GRACE, until - time.monotonic()))
        if self._writer.is_alive() or not read:
            # The lock is held until the process ends: nobody else may come while a file is being written.
            log.warning("the prefix cache in %s does not answer and is left alone", self._folder.path)
            return
        self._folder.release()

    def stats(self) -> DiskStats:
        with self._changed:
            counts = {name: self._counts[name] for name in ("hits", "written", "dropped", "failed", "damaged")}
            return DiskStats(self._index.bytes, len(self._index), **counts)

    def _touch(self, names: Sequence[str]) -> None:
        """Under the lock. In the order in which they are to be the most recent."""
        for name in names:
            self._touched.pop(name, None)
            self._touched[name] = None
        if names:
            self._changed.notify()

    def _drop_jobs(self) -> int:
        """Under the lock. A job that the writer has taken is not among them."""
        dropped = len(self._jobs)
        for job in self._jobs:
            self._no_longer_comes(job)
        self._jobs.clear()
        return dropped

    def _no_longer_comes(self, job: _Job) -> None:
        """Under the lock."""
        self._queued -= job.run.data_bytes
        for item in (file_name(job.keys), *job.keys):
            self._coming[item] -= 1
            if not self._coming[item]:
                del self._coming[item]

    def _was_read(self, runs: int) -> None:
        """On the reader's thread."""
        with self._changed:
            self._counts["hits"] += runs

    def _is_bad(self, name: str, damaged: bool) -> None:
        """On the reader's thread. The writer removes the file: nobody else does, so it cannot hit one that is new."""
        with self._changed:
            if self._index.remove(name):
                self._counts["damaged"] += damaged
                self._doomed.append(name)
                self._changed.notify()

    # From here on, on the writer's thread.

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        finally:
            # However it ends: what nobody will write is not promised.
            with self._changed:
                self._open = False
                self._counts["dropped"] += self._drop_jobs()
                self._coming.clear()

    def _turn(self) -> bool:
        """Do what there is to do; wait for it if there is nothing. Whether there may be more."""
        with self._changed:
            while self._open and not (self._jobs or self._doomed or self._touched):
                self._changed.wait()
            more = bool(self._open or self._jobs or self._doomed or self._touched)
            job = self._jobs.popleft() if self._jobs else None
            doomed, self._doomed = self._doomed, []
            touched, self._touched = self._touched, {}
        for name in doomed:
            self._remove(name)
        for name in touched:
            # Never the same time twice: the order of the files must survive.
            self._last_touch = max(time.time_ns(), self._last_touch + 1)
            self._folder.touch(name, self._last_touch)
        if job is not None:
            self._write(job)
        return more

    def _write(self, job: _Job) -> None:
        name = file_name(job.keys)
        pieces = pack(job.run, self._stamp)
        size = bytes_on_disk(sum(map(len, pieces)))
        outcome = "dropped"
        if job.run.keys != job.keys:
            log.error("a run of blocks came with keys that are not its own: it is not written")
            outcome = "failed"
        elif self._make_room(job, size):
            outcome = "written" if self._put(name, pieces) else "failed"
        with self._changed:
            self._no_longer_comes(job)
            if outcome == "written" and job.era != self._era:
                self._doomed.append(name)  # cleared while it was being written
                return
            self._counts[outcome] += 1
            if outcome == "written":
                self._touch(self._index.add(job.keys, name, size, job.run.parent))

    def _make_room(self, job: _Job, size: int) -> bool:
        """Before anything is written. Files that were forgotten since the turn began are still there and go as well."""
        with self._changed:
            leaving = None if job.era != self._era else self._index.evict_for(size, job.run.parent)
            doomed, self._doomed = self._doomed, []
        for name in (*doomed, *(leaving or ())):
            self._remove(name)
        return leaving is not None and not self._stuck

    def _put(self, name: str, pieces: Sequence[bytes]) -> bool:
        try:
            self._folder.write(name, pieces)
        except OSError as error:
            if not self._complained:
                log.warning("the prefix cache in %s cannot be written: %s", self._folder.path, error)
            self._complained = True
            return False
        self._complained = False
        return True

    def _remove(self, name: str) -> None:
        if not self._folder.remove(name) and not self._stuck:
            self._stuck = True
            log.warning("the prefix cache in %s takes nothing more: its budget cannot be held", self._folder.path)
