"""Records as files of one folder: bounded, expiring, found again after a restart. Blocking: one thread at a time.

Only files whose names could be made here are read or removed: a folder that also holds other files loses none of them.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from millstream.service.store import record_file
from millstream.service.store.record_file import DamagedRecord, Record, file_name

log = logging.getLogger(__name__)

_PAGE_BYTES = 4096


class RecordFolder:
    """Holds at most `max_bytes` on disk, each record for at most `max_age` seconds. The least recently used ones give
    way; a file's modification time is when its record was last used.

    Servers may share a folder: a record is looked for on disk, wherever it came from. Each bounds what it knows of.
    """

    def __init__(self, path: Path, *, max_bytes: int, max_age: float, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._max_age = max_age
        self._clock = clock
        self._sizes: OrderedDict[str, int] = OrderedDict()
        """Bytes on disk by file name, least recently used first."""
        self._bytes = 0

    def scan(self) -> None:
        """Finds the records of earlier runs. Removes partial writes, damaged files, and records past their age."""
        found = []
        with os.scandir(self._path) as entries:
            names = [entry.name for entry in entries]
        for name in names:
            if re.fullmatch(record_file.TEMPORARY_NAME, name):
                self._remove(name)
            elif re.fullmatch(record_file.FILE_NAME, name) and (file := self._inspect(name)) is not None:
                found.append(file)
        for _, name, size in sorted(found):
            self._note(name, size)
        self._evict()

    def put(self, key: str, data: bytes) -> None:
        """Raises OSError if it cannot be written; an older record of this key is gone then as well."""
        name, packed = file_name(key), record_file.pack(Record(key, self._clock(), data))
        self._remove(name)
        size = _bytes_on_disk(len(packed))
        if size > self._max_bytes:
            log.warning("a record of %d bytes is not stored: the store holds at most %d", len(data), self._max_bytes)
            return
        record_file.write(self._path / name, packed)
        self._note(name, size)
        self._evict()

    def get(self, key: str) -> bytes | None:
        """Raises OSError if it cannot be read."""
        name = file_name(key)
        try:
            record = record_file.read(self._path / name, self._max_bytes)
            if record.key != key:
                raise DamagedRecord("it holds another key")
        except FileNotFoundError:
            self._forget(name)
            return None
        except DamagedRecord as error:
            self._discard(name, error)
            return None
        if self._is_old(record.written):
            self._remove(name)
            return None
        self._touch(name)
        return record.data

    def delete(self, key: str) -> bool:
        found = self.get(key) is not None
        self._remove(file_name(key))
        return found

    def _inspect(self, name: str) -> tuple[int, str, int] | None:
        """When it was last used, its name and its size. None if it is of no use."""
        try:
            if self._is_old(record_file.written_at(self._path / name)):
                self._remove(name)
                return None
            status = os.stat(self._path / name, follow_symlinks=False)
        except DamagedRecord as error:
            self._discard(name, error)
            return None
        except OSError as error:  # such as too many open files: it may be readable later
            log.warning("cannot read %s of the store: %s", name, error)
            return None
        return status.st_mtime_ns, name, _bytes_on_disk(status.st_size)

    def _is_old(self, written: float) -> bool:
        return self._clock() - written > self._max_age

    def _note(self, name: str, size: int) -> None:
        self._forget(name)
        self._sizes[name] = size
        self._bytes += size

    def _forget(self, name: str) -> None:
        self._bytes -= self._sizes.pop(name, 0)

    def _touch(self, name: str) -> None:
        if name in self._sizes:
            self._sizes.move_to_end(name)
        with suppress(OSError):
            os.utime(self._path / name)

    def _evict(self) -> None:
        while self._bytes > self._max_bytes:
            self._remove(next(iter(self._sizes)))

    def _discard(self, name: str, error: DamagedRecord) -> None:
        log.warning("removing %s from the store: %s", name, error)
        self._remove(name)

    def _remove(self, name: str) -> None:
        self._forget(name)
        try:
            (self._path / name).unlink(missing_ok=True)
        except OSError as error:
            log.warning("cannot remove %s from the store: %s", name, error)


def _bytes_on_disk(size: int) -> int:
    """File systems allocate whole pages; this also bounds the number of small files."""
    return -(-size // _PAGE_BYTES) * _PAGE_BYTES
