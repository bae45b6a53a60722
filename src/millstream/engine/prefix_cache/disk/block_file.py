"""Serialises KV blocks and checkpoints to block files and reads them back: a length, a JSON header, then tensor data.

The format is safetensors, so other programs can read it. A checksum covers the whole file, including its header, and a
file that differs in any byte from what `pack` writes raises `DamagedFile`.
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
    HEADER_START,
    MAX_HEADER_BYTES,
    ZERO_DIGEST,
    Header,
    TensorInfo,
    parse_header,
)
from millstream.types import Tensor

_DIGEST = slice(8 + len(HEADER_START), 8 + len(HEADER_START) + len(ZERO_DIGEST))
"""The bytes of the digest in a file. They are zeros while it is computed."""


class DamagedFile(Exception):
    """A file that cannot be used: truncated, changed, of another model, or not a block file."""


@dataclass(frozen=True, slots=True)
class StoredRun:
    """The contents of a block file: consecutive KV blocks of one prefix, or a checkpoint. The last block may be
    shorter."""

    parent: str
    """The hash of the block before the first, or the root hash."""
    block: int
    """Tokens per block."""
    tokens: tuple[int, ...]
    contents: tuple[tuple[int, str], ...]
    """Media: (position, hash). Positions count from the run's first token."""
    tensors: tuple[tuple[str, Tensor], ...]
    extra: str = ""
    """Metadata of the backend, opaque here."""

    def __post_init__(self) -> None:
        """Raises ValueError if the run could not be read back."""
        self.header("")

    @property
    def keys(self) -> tuple[str, ...]:
        return self.header("").keys

    @property
    def data_bytes(self) -> int:
        return sum(len(tensor.data) for _, tensor in self.tensors)

    def header(self, stamp: str) -> Header:
        infos: list[TensorInfo] = []
        start = 0
        for name, tensor in self.tensors:
            end = start + len(tensor.data)
            infos.append(TensorInfo(name, tensor.dtype, tensor.shape, start, end))
            start = end
        return Header(stamp, self.parent, self.block, self.tokens, self.contents, self.extra, tuple(infos))


def pack(run: StoredRun, stamp: str) -> list[bytes]:
    """Serialise a run: a list of buffers, the header first, then the data of each tensor, which is not copied."""
    text = run.header(stamp).text()
    head = struct.pack("<Q", len(text)) + text
    data = [tensor.data for _, tensor in run.tensors]
    digest = _digest([head, *data]).encode()
    return [head[: _DIGEST.start] + digest + head[_DIGEST.stop :], *data]


def unpack(data: bytes, stamp: str) -> StoredRun:
    """Deserialise the bytes of a file. Raises DamagedFile, and nothing else, if they are not a valid file."""
    return read_run(io.BytesIO(data), len(data), stamp)


def read_run(file: BinaryIO, size: int, stamp: str) -> StoredRun:
    """Read and verify an open file of `size` bytes. Each tensor is read into its own buffer: files may be large, and
    this way nothing is copied. Raises DamagedFile.
    """
    prefix = file.read(8)
    text = file.read(_header_length(prefix, size))
    header = _parse(text, size)
    data = [file.read(info.end - info.start) for info in header.tensors]
    head = prefix + text
    if _digest([head[: _DIGEST.start], ZERO_DIGEST.encode(), head[_DIGEST.stop :], *data]).encode() != head[_DIGEST]:
        raise DamagedFile("the checksum does not match")
    if header.stamp != stamp:
        raise DamagedFile(f"it belongs to another model or version: {header.stamp[:200]!r}")
    pairs = zip(header.tensors, data, strict=True)
    tensors = tuple((info.name, Tensor(info.dtype, info.shape, buffer)) for info, buffer in pairs)
    return StoredRun(header.parent, header.block, header.tokens, header.contents, tensors, header.extra)


def read_header(path: Path) -> Header:
    """Read a file's header only; the checksum is not verified. Raises DamagedFile or OSError."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = _header_length(file.read(8), size)
        return _parse(file.read(length), size)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading, without following a symbolic link or blocking on a pipe. Raises DamagedFile if
    it is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DamagedFile("it is not a regular file")
    return os.fdopen(descriptor, "rb")


def _digest(buffers: Iterable[bytes]) -> str:
    state = hashlib.blake2b(digest_size=len(ZERO_DIGEST) // 2, person=b"millstream-file")
    for buffer in buffers:
        state.update(buffer)
    return state.hexdigest()


def _header_length(prefix: bytes, size: int) -> int:
    if len(prefix) < 8:
        raise DamagedFile("it is too short")
    (length,) = struct.unpack("<Q", prefix)
    if not _DIGEST.stop <= 8 + length <= min(size, MAX_HEADER_BYTES):
        raise DamagedFile("the length of its header is not possible")
    return int(length)


def _parse(text: bytes, size: int) -> Header:
    try:
        header = parse_header(text)
    except ValueError as error:
        raise DamagedFile(str(error)[:200]) from error
    if 8 + len(text) + header.data_bytes != size:
        raise DamagedFile("its size differs from what its header says")
    return header
