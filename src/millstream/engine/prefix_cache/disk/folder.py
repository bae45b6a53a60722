"""A folder of block files on disk: locked for one server, scanned at start, with atomic writes.

Only files whose names `file_name` could have made are read or removed: a folder that also holds a user's own files
loses none of them.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from millstream.engine.prefix_cache.disk.block_file import DamagedFile, StoredRun, open_regular, read_header, read_run

log = logging.getLogger(__name__)

WriteFile = Callable[[Path, Sequence[bytes]], None]

_FILE_NAME = re.compile(r"kv-[0-9a-f]{40}-[1-9][0-9]{0,6}\.safetensors")
_TEMPORARY_SUFFIX = ".tmp"
_PAGE_BYTES = 4096


class StoreBusy(Exception):
    """Another server has locked the folder."""


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A usable block file that was in the folder when it was scanned."""

    name: str
    keys: tuple[str, ...]
    parent: str
    size: int
    last_used: int
    """Nanoseconds since the epoch."""


def file_name(keys: Sequence[str]) -> str:
    """The name of the file for these blocks. The last hash covers all blocks before it, so equal names mean equal
    blocks."""
    return f"kv-{keys[-1]}-{len(keys)}.safetensors"


def bytes_on_disk(size: int) -> int:
    """The bytes that a file occupies: file systems allocate whole pages."""
    return -(-size // _PAGE_BYTES) * _PAGE_BYTES


def write_file(path: Path, buffers: Sequence[bytes]) -> None:
    """Write and sync a new file. It contains prompts, so only its owner may read it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        for buffer in buffers:
            view = memoryview(buffer)
            while view:
                view = view[file.write(view) :]
        os.fsync(descriptor)


def is_resource_shortage(error: Exception) -> bool:
    """True if a file could not be read for lack of memory or file descriptors: the file itself may be fine."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class DiskFolder:
    """One thread at a time may write, touch and remove files; any thread may read. A file is complete once it has its
    name."""

    def __init__(self, path: Path, stamp: str, write: WriteFile = write_file) -> None:
        self.path = path
        self._stamp = stamp
        self._write = write
        self._lock: int | None = None

    def acquire(self) -> None:
        """Create the folder and lock it until `release` or the end of the process. Raises StoreBusy or OSError."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                raise StoreBusy(f"another server is using {self.path}") from error
            raise
        self._lock = descriptor

    def release(self) -> None:
        """Unlock the folder. The lock file stays: if it were removed, two servers could each lock a file of that
        name."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def scan(self) -> tuple[list[FoundFile], list[str]]:
        """Returns the usable files, least recently used first, and the names of the damaged ones. Removes partial
        writes."""
        found: list[FoundFile] = []
        damaged: list[str] = []
        for entry in list(os.scandir(self.path)):
            if not _FILE_NAME.fullmatch(entry.name.removesuffix(_TEMPORARY_SUFFIX)):
                continue
            if entry.name.endswith(_TEMPORARY_SUFFIX):
                self.remove(entry.name)
                continue
            try:
                found.append(self._inspect(entry.name))
            except (DamagedFile, OSError) as error:
                if is_resource_shortage(error):
                    raise
                log.warning("removing %s from the prefix cache: %s", entry.name, error)
                damaged.append(entry.name)
        return sorted(found, key=lambda file: (file.last_used, file.name)), damaged

    def _inspect(self, name: str) -> FoundFile:
        header = read_header(self.path / name)
        if header.stamp != self._stamp:
            raise DamagedFile("it belongs to another model or version")
        keys = header.keys
        if file_name(keys) != name:
            raise DamagedFile("its name does not match its contents")
        status = os.stat(self.path / name)
        return FoundFile(name, keys, header.parent, bytes_on_disk(status.st_size), status.st_mtime_ns)

    def read(self, name: str) -> StoredRun:
        """Read and verify a whole file. Raises DamagedFile or OSError."""
        with open_regular(self.path / name) as file:
            run = read_run(file, os.fstat(file.fileno()).st_size, self._stamp)
        if file_name(run.keys) != name:
            raise DamagedFile("its name does not match its contents")
        return run

    def write(self, name: str, buffers: Sequence[bytes]) -> None:
        """Write a file atomically: it gets its name once all of it is on disk. Raises OSError and leaves nothing behind
        if that fails.
        """
        temporary = self.path / f"{name}{_TEMPORARY_SUFFIX}"
        try:
            self._write(temporary, buffers)
            os.replace(temporary, self.path / name)
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

    def remove(self, name: str) -> bool:
        """Remove a file; False if it is still there. A folder of that name is not ours: it is removed only if it is
        empty."""
        path = self.path / name
        is_folder = path.is_dir() and not path.is_symlink()
        try:
            if is_folder:
                path.rmdir()
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("cannot remove %s from the prefix cache: %s", name, error)
            return is_folder
        return True

    def touch(self, name: str, when: int) -> None:
        """Set when a file was last used, in nanoseconds since the epoch. Does nothing if the file is gone."""
        with suppress(OSError):
            os.utime(self.path / name, ns=(when, when))
