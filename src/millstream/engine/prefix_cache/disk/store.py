"""Stores runs of KV blocks in files within a byte budget. A writer and a reader thread keep the owner off the disk."""

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
from millstream.engine.prefix_cache.disk.reader import DiskReader, OnRead

log = logging.getLogger(__name__)

QUEUE_BYTES = 256 << 20
GRACE_SECONDS = 1.0
"""For a write that is under way when `close` runs out of time."""


@dataclass(frozen=True, slots=True)
class DiskStats:
    """`bytes` and `files` are current; the other figures count from `open`."""

    bytes: int
    files: int
    hits: int
    """Runs that were read."""
    written: int
    dropped: int
    """Runs that were not written because the queue was full or the budget too small."""
    failed: int
    """Runs whose write failed."""
    damaged: int
    """Files that were removed because they were damaged or of another model."""


@dataclass(frozen=True, slots=True)
class _QueuedWrite:
    run: StoredRun
    keys: tuple[str, ...]
    epoch: int
    """How often the store had been cleared when it was queued."""


class DiskStore:
    """For one owner thread, which waits for the disk only in `open` and `close`. Opened and closed once.

    A folder belongs to one stamp: files of another model or version are removed.

    Threads meet here. The owner matches, reads and writes; only the writer thread changes the folder; the reader thread
    reports unusable files. Shared state is guarded by the condition's lock, and no file is accessed while it is held.
    Because only the writer adds files, space that it has freed is still free when it writes. Nothing else is
    guaranteed: a file that `match` has returned may be gone when it is read, which is a miss.
    """

    def __init__(
        self, folder: Path, budget: int, stamp: str, *, queue_bytes: int = QUEUE_BYTES, write: WriteFile = write_file
    ) -> None:
        self._stamp = stamp
        self._queue_bytes = queue_bytes
        self._folder = DiskFolder(folder, stamp, write)
        self._reader = DiskReader(self._folder, self._count_hits, self._discard)
        self._writer = threading.Thread(target=self._run, name="prefix-writer", daemon=True)
        self._last_touch = 0
        self._write_failed = False
        self._remove_failed = False
        self._changed = threading.Condition()
        # Guarded by the lock:
        self._index = DiskIndex(budget)
        self._counts: Counter[str] = Counter()
        self._open = False
        self._queue: deque[_QueuedWrite] = deque()
        self._queued_bytes = 0
        self._pending: Counter[str] = Counter()
        """Names and keys of runs that are queued or being written."""
        self._to_remove: list[str] = []
        self._to_touch: dict[str, None] = {}
        self._epoch = 0

    def open(self) -> None:
        """Lock the folder and index its files. Raises StoreBusy, or OSError if the folder cannot be used."""
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
        """The longest prefix of `keys` that is on disk. Counts as a use."""
        with self._changed:
            pieces = self._index.match(keys)
            self._touch(self._index.touch(piece.name for piece in pieces))
        return pieces

    def find_first(self, keys: Sequence[str]) -> tuple[int, Piece] | None:
        """The first of `keys` that is the last key of a file, such as a checkpoint: its number and the whole file.
        Counts as a use."""
        with self._changed:
            for number, key in enumerate(keys):
                if (piece := self._index.find(key)) is not None:
                    self._touch(self._index.touch([piece.name]))
                    return number, piece
        return None

    def holds_all(self, keys: Sequence[str]) -> bool:
        """True if all these blocks are on disk or queued to be written, so that they need not be exported again."""
        with self._changed:
            return all(self._index.holds(key) or key in self._pending for key in keys)

    def write_soon(self, run: StoredRun, keys: Sequence[str]) -> None:
        """Queue a run to be written; it matches once it is on disk. `keys` are `run.keys`, which the caller has
        already."""
        name = file_name(keys)
        with self._changed:
            if name in self._index or self._pending[name]:
                self._touch(self._index.touch([*self._index.ancestors(run.parent), name]))
            elif not self._open or self._queued_bytes + run.data_bytes > self._queue_bytes:
                self._counts["dropped"] += 1
            else:
                self._queue.append(_QueuedWrite(run, tuple(keys), self._epoch))
                self._queued_bytes += run.data_bytes
                self._pending.update([name, *keys])
                self._changed.notify()

    def read_soon(self, pieces: Sequence[Piece], on_read: OnRead) -> None:
        """Read the runs that contain these pieces, whole. `on_read` gets them on the reader's thread; it gets None if
        that fails, and at once if the store is closed."""
        self._reader.read_soon(tuple(pieces), on_read)

    def clear(self) -> None:
        """Drop all blocks, queued ones too. The writer removes the files later."""
        with self._changed:
            self._epoch += 1
            self._drop_queued()
            self._to_touch.clear()
            self._to_remove += self._index.clear()
            self._changed.notify()

    def close(self, timeout: float) -> None:
        """Write queued runs, for at most `timeout` seconds, and unlock the folder."""
        deadline = time.monotonic() + timeout
        with self._changed:
            self._open = False
            self._changed.notify()
        if self._writer.ident is None:
            return
        self._writer.join(timeout)
        with self._changed:
            self._counts["dropped"] += self._drop_queued()
        self._writer.join(GRACE_SECONDS)
        reader_ended = self._reader.close(max(GRACE_SECONDS, deadline - time.monotonic()))
        if self._writer.is_alive() or not reader_ended:
            # Keep the lock until the process ends: no other server may use the folder while a file is being written.
            log.warning("the disk of the prefix cache in %s does not respond; not waiting for it", self._folder.path)
            return
        self._folder.release()

    def stats(self) -> DiskStats:
        with self._changed:
            counts = {name: self._counts[name] for name in ("hits", "written", "dropped", "failed", "damaged")}
            return DiskStats(self._index.bytes, len(self._index), **counts)

    def _touch(self, names: Sequence[str]) -> None:
        """Under the lock. Queue files to be touched; the last becomes the most recent."""
        for name in names:
            self._to_touch.pop(name, None)
            self._to_touch[name] = None
        if names:
            self._changed.notify()

    def _drop_queued(self) -> int:
        """Under the lock. Drop all queued writes, but not the one under way; returns how many."""
        dropped = len(self._queue)
        for queued in self._queue:
            self._unqueue(queued)
        self._queue.clear()
        return dropped

    def _unqueue(self, queued: _QueuedWrite) -> None:
        """Under the lock. A write is dropped or has ended."""
        self._queued_bytes -= queued.run.data_bytes
        for item in (file_name(queued.keys), *queued.keys):
            self._pending[item] -= 1
            if not self._pending[item]:
                del self._pending[item]

    def _count_hits(self, runs: int) -> None:
        """On the reader's thread."""
        with self._changed:
            self._counts["hits"] += runs

    def _discard(self, name: str, damaged: bool) -> None:
        """On the reader's thread. Only the writer removes files, so this cannot remove a newly written one."""
        with self._changed:
            if self._index.remove(name):
                self._counts["damaged"] += damaged
                self._to_remove.append(name)
                self._changed.notify()

    # On the writer's thread from here on.

    def _run(self) -> None:
        try:
            while self._run_once():
                pass
        finally:
            # However the thread ends: `holds_all` must not count on runs that are never written.
            with self._changed:
                self._open = False
                self._counts["dropped"] += self._drop_queued()
                self._pending.clear()

    def _run_once(self) -> bool:
        """Wait for work and do some; False if the store is closed and nothing is left."""
        with self._changed:
            while self._open and not (self._queue or self._to_remove or self._to_touch):
                self._changed.wait()
            more = bool(self._open or self._queue or self._to_remove or self._to_touch)
            queued = self._queue.popleft() if self._queue else None
            to_remove, self._to_remove = self._to_remove, []
            to_touch, self._to_touch = self._to_touch, {}
        for name in to_remove:
            self._remove(name)
        for name in to_touch:
            # Never the same time twice: the LRU order must survive a restart.
            self._last_touch = max(time.time_ns(), self._last_touch + 1)
            self._folder.touch(name, self._last_touch)
        if queued is not None:
            self._write(queued)
        return more

    def _write(self, queued: _QueuedWrite) -> None:
        name = file_name(queued.keys)
        buffers = pack(queued.run, self._stamp)
        size = bytes_on_disk(sum(map(len, buffers)))
        outcome = "dropped"
        if queued.run.keys != queued.keys:
            log.error("a run of blocks came with the hashes of other blocks; it is not written")
            outcome = "failed"
        elif self._evict_for(queued, size):
            outcome = "written" if self._write_file(name, buffers) else "failed"
        with self._changed:
            self._unqueue(queued)
            if outcome == "written" and queued.epoch != self._epoch:
                self._to_remove.append(name)  # cleared while it was being written
                return
            self._counts[outcome] += 1
            if outcome == "written":
                self._touch(self._index.add(queued.keys, name, size, queued.run.parent))

    def _evict_for(self, queued: _QueuedWrite, size: int) -> bool:
        """Free space before a write; False if it must not be written. Files that were discarded since `_run_once` began
        still take space, so they are removed as well."""
        with self._changed:
            evicted = None if queued.epoch != self._epoch else self._index.evict_for(size, queued.run.parent)
            to_remove, self._to_remove = self._to_remove, []
        for name in (*to_remove, *(evicted or ())):
            self._remove(name)
        return evicted is not None and not self._remove_failed

    def _write_file(self, name: str, buffers: Sequence[bytes]) -> bool:
        try:
            self._folder.write(name, buffers)
        except OSError as error:
            if not self._write_failed:
                log.warning("cannot write to the prefix cache in %s: %s", self._folder.path, error)
            self._write_failed = True
            return False
        self._write_failed = False
        return True

    def _remove(self, name: str) -> None:
        if not self._folder.remove(name) and not self._remove_failed:
            self._remove_failed = True
            log.warning(
                "no more writes to the prefix cache in %s: a file cannot be removed, so it would exceed its budget",
                self._folder.path,
            )
