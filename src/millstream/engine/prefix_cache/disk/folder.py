"""A folder of block files and nothing else of ours: its lock, what is in it, and how files get there and leave.

Only names that we could have given are ever looked at or removed: a folder that turns out to hold a person's own files
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

from millstream.engine.prefix_cache.disk.block_file import DamagedFile, StoredRun, open_plain, read_header, read_run

log = logging.getLogger(__name__)

WriteFile = Callable[[Path, Sequence[bytes]], None]

_OURS = re.compile(r"kv-[0-9a-f]{40}-[1-9][0-9]{0,6}\.safetensors")
_TEMPORARY = ".tmp"
_PAGE = 4096


class StoreBusy(Exception):
    """Another server has this folder."""


@dataclass(frozen=True, slots=True)
class FoundFile:
    name: str
    keys: tuple[str, ...]
    parent: str
    size: int
    used: int
    """When it was last used, in nanoseconds."""


def file_name(keys: Sequence[str]) -> str:
    """The last key says all that is in the blocks before it, and so the name says all that is in a file."""
    return f"kv-{keys[-1]}-{len(keys)}.safetensors"


def bytes_on_disk(size: int) -> int:
    """What a file takes there: file systems give whole pages."""
    return -(-size // _PAGE) * _PAGE


def write_file(path: Path, pieces: Sequence[bytes]) -> None:
    """A new file, on the disk when this returns. Prompts can be read in it, so it is its user's alone."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        for piece in pieces:
            view = memoryview(piece)
            while view:
                view = view[file.write(view) :]
        os.fsync(descriptor)


def not_its_fault(error: Exception) -> bool:
    """Whether a file could not be read for reasons that have nothing to do with it."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class DiskFolder:
    """One thread at a time may change what is in it; any may read. A file is whole once its name is there."""

    def __init__(self, path: Path, stamp: str, write: WriteFile = write_file) -> None:
        self.path = path
        self._stamp = stamp
        self._write = write
        self._lock: int | None = None

    def acquire(self) -> None:
        """Make the folder and lock it, until `release` or the end of the process. Raises StoreBusy and OSError."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                raise StoreBusy(f"another server uses {self.path}") from error
            raise
        self._lock = descriptor

    def release(self) -> None:
        """The lock's file stays: were it removed, two servers could each lock another file of that name."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def scan(self) -> tuple[list[FoundFile], list[str]]:
        """The files here, least recently used first, and those that are no good. What was being written is removed."""
        found: list[FoundFile] = []
        damaged: list[str] = []
        for entry in list(os.scandir(self.path)):
            if not _OURS.fullmatch(entry.name.removesuffix(_TEMPORARY)):
                continue
            if entry.name.endswith(_TEMPORARY):
                self.remove(entry.name)
                continue
            try:
                found.append(self._look(entry.name))
            except (DamagedFile, OSError) as error:
                if not_its_fault(error):
                    raise
                log.warning("%s in the prefix cache is no good and goes: %s", entry.name, error)
                damaged.append(entry.name)
        return sorted(found, key=lambda file: (file.used, file.name)), damaged

    def _look(self, name: str) -> FoundFile:
        header = read_header(self.path / name)
        if header.stamp != self._stamp:
            raise DamagedFile("of another model or version")
        keys = header.keys
        if file_name(keys) != name:
            raise DamagedFile("not what its name says")
        status = os.stat(self.path / name)
        return FoundFile(name, keys, header.parent, bytes_on_disk(status.st_size), status.st_mtime_ns)

    def read(self, name: str) -> StoredRun:
        """A whole file, checked to the last byte. Raises DamagedFile and OSError."""
        with open_plain(self.path / name) as file:
            run = read_run(file, os.fstat(file.fileno()).st_size, self._stamp)
        if file_name(run.keys) != name:
            raise DamagedFile("not what its name says")
        return run

    def write(self, name: str, pieces: Sequence[bytes]) -> None:
        """The name appears when all is on the disk. If that fails nothing is left. Raises OSError."""
        temporary = self.path / f"{name}{_TEMPORARY}"
        try:
            self._write(temporary, pieces)
            os.replace(temporary, self.path / name)
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

    def remove(self, name: str) -> bool:
        """Whether nothing of ours is left there. A folder in its place is not ours: it goes only if it is empty."""
        path = self.path / name
        folder = path.is_dir() and not path.is_symlink()
        try:
            if folder:
                path.rmdir()
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s cannot be removed from the prefix cache: %s", name, error)
            return folder
        return True

    def touch(self, name: str, when: int) -> None:
        """It may have left meanwhile."""
        with suppress(OSError):
            os.utime(self.path / name, ns=(when, when))
