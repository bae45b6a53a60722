"""The file of one record: its format, atomic writes, and reads that trust nothing.

A file is named by a hash of its record's key, so a key that a client chose is never part of a path.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

FILE_NAME = r"record-[0-9a-f]{64}"
TEMPORARY_NAME = rf"{FILE_NAME}\.[0-9a-f]{{16}}\.tmp"

_MAGIC = b"millstream record 1\n"
_HEADER = struct.Struct("<20sd32sI")
"""The magic, when it was written (in seconds since 1970), a hash of all that follows, and the length of the key. The
key and the record follow."""


class DamagedRecord(Exception):
    """A file is not a record as it was written."""


@dataclass(frozen=True, slots=True)
class Record:
    key: str
    written: float
    """In seconds since 1970."""
    data: bytes


def file_name(key: str) -> str:
    return f"record-{hashlib.sha256(key.encode(errors='surrogatepass')).hexdigest()}"


def pack(record: Record) -> bytes:
    key = record.key.encode(errors="surrogatepass")
    rest = key + record.data
    return _HEADER.pack(_MAGIC, record.written, hashlib.sha256(rest).digest(), len(key)) + rest


def write(path: Path, data: bytes) -> None:
    """The file gets its name once all of it is written. Only its owner may read it. Raises OSError, and leaves nothing
    behind, if it cannot be written."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def read(path: Path, max_bytes: int) -> Record:
    """Raises DamagedRecord or OSError."""
    with _opened(path) as file:
        data = file.read(max_bytes + 1)
    written, digest, key_length = _header(data)
    rest = data[_HEADER.size :]
    if len(data) > max_bytes or key_length > len(rest) or hashlib.sha256(rest).digest() != digest:
        raise DamagedRecord("its contents have changed")
    return Record(rest[:key_length].decode(errors="surrogatepass"), written, rest[key_length:])


def written_at(path: Path) -> float:
    """When the record was written, from the header alone. Raises DamagedRecord or OSError."""
    with _opened(path) as file:
        return _header(file.read(_HEADER.size))[0]


def _header(data: bytes) -> tuple[float, bytes, int]:
    if len(data) < _HEADER.size:
        raise DamagedRecord("it is too short")
    magic, written, digest, key_length = _HEADER.unpack_from(data)
    if magic != _MAGIC or written != written:  # a time that is not a number would never expire
        raise DamagedRecord("it is not a record of this version")
    return written, digest, key_length


def _opened(path: Path) -> BinaryIO:
    """Without following a symbolic link or blocking on a pipe."""
    if path.is_symlink():
        raise DamagedRecord("it is a symbolic link")
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DamagedRecord("it is not a regular file")
    return os.fdopen(descriptor, "rb")
