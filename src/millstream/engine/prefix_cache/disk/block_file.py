"""Blocks of a chain as one file, in the safetensors format: a length, a JSON header, data. Pure, but for `read_header`.

A checksum covers the whole file, its header too. What is not exactly what `pack` writes is a `DamagedFile`.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from millstream.engine.prefix_cache.disk.block_header import (
    MOST_HEADER,
    NO_DIGEST,
    OPENING,
    Header,
    Place,
    parse_header,
)
from millstream.types import Tensor

_DIGEST = slice(8 + len(OPENING), 8 + len(OPENING) + len(NO_DIGEST))
"""Where the digest is in a file. While hashing, zeros are there."""


class DamagedFile(Exception):
    """A file that cannot be used: cut off, changed, of another model, or never one of ours."""


@dataclass(frozen=True, slots=True)
class StoredRun:
    """Consecutive blocks of one chain, or a checkpoint. The last block may be a short one."""

    parent: str
    """The key of the block before the first, or of the root."""
    block: int
    """Tokens in a block."""
    tokens: tuple[int, ...]
    contents: tuple[tuple[int, str], ...]
    """What stands at a place besides its token; places count from the run's first token."""
    tensors: tuple[tuple[str, Tensor], ...]
    extra: str = ""
    """The backend's own words, opaque here."""

    def __post_init__(self) -> None:
        """What could not be read again raises ValueError where it is made."""
        self.header("")

    @property
    def keys(self) -> tuple[str, ...]:
        return self.header("").keys

    @property
    def data_bytes(self) -> int:
        return sum(len(tensor.data) for _, tensor in self.tensors)

    def header(self, stamp: str) -> Header:
        places: list[Place] = []
        start = 0
        for name, tensor in self.tensors:
            end = start + len(tensor.data)
            places.append(Place(name, tensor.dtype, tensor.shape, start, end))
            start = end
        return Header(stamp, self.parent, self.block, self.tokens, self.contents, self.extra, tuple(places))


def pack(run: StoredRun, stamp: str) -> list[bytes]:
    """The file in pieces: first the header, then the tensors' own bytes, which are not copied."""
    text = run.header(stamp).text()
    head = struct.pack("<Q", len(text)) + text
    data = [tensor.data for _, tensor in run.tensors]
    digest = _digest([head, *data]).encode()
    return [head[: _DIGEST.start] + digest + head[_DIGEST.stop :], *data]


def unpack(data: bytes, stamp: str) -> StoredRun:
    """The run in a whole file. Raises DamagedFile and nothing else, whatever the bytes are."""
    return read_run(io.BytesIO(data), len(data), stamp)


def read_run(file: BinaryIO, size: int, stamp: str) -> StoredRun:
    """The run in a file of `size` bytes. Each tensor is read where it stays: a file may be large."""
    prefix = file.read(8)
    text = file.read(_header_length(prefix, size))
    header = _parse(text, size)
    data = [file.read(place.end - place.start) for place in header.places]
    head = prefix + text
    if _digest([head[: _DIGEST.start], NO_DIGEST.encode(), head[_DIGEST.stop :], *data]).encode() != head[_DIGEST]:
        raise DamagedFile("the checksum is another one")
    if header.stamp != stamp:
        raise DamagedFile(f"of another model or version: {header.stamp[:200]!r}")
    places = zip(header.places, data, strict=True)
    tensors = tuple((place.name, Tensor(place.dtype, place.shape, piece)) for place, piece in places)
    return StoredRun(header.parent, header.block, header.tokens, header.contents, tensors, header.extra)


def read_header(path: Path) -> Header:
    """The header of a file, without its data: the checksum is not looked at. Raises DamagedFile and OSError."""
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = _header_length(file.read(8), size)
        return _parse(file.read(length), size)


def open_plain(path: Path) -> BinaryIO:
    """Open a file to read that is no link to somewhere else, and no pipe, which would wait for a writer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DamagedFile("not a plain file")
    return os.fdopen(descriptor, "rb")


def _digest(pieces: Iterable[bytes]) -> str:
    state = hashlib.blake2b(digest_size=len(NO_DIGEST) // 2, person=b"millstream-file")
    for piece in pieces:
        state.update(piece)
    return state.hexdigest()


def _header_length(prefix: bytes, size: int) -> int:
    if len(prefix) < 8:
        raise DamagedFile("too short")
    (length,) = struct.unpack("<Q", prefix)
    if not _DIGEST.stop <= 8 + length <= min(size, MOST_HEADER):
        raise DamagedFile("the header has no possible length")
    return int(length)


def _parse(text: bytes, size: int) -> Header:
    try:
        header = parse_header(text)
    except ValueError as error:
        raise DamagedFile(str(error)[:200]) from error
    if 8 + len(text) + header.data_bytes != size:
        raise DamagedFile("the file is not as long as its header says")
    return header
