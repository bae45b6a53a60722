"""Finds Whisper's weights: safetensors under any name, or the NumPy archive of older conversions for MLX.

An archive is a zip file of arrays. Its members' headers are read here, without NumPy's pickles, before MLX opens it.
"""

from __future__ import annotations

import ast
import re
import zipfile
from math import prod
from pathlib import Path

from millstream.errors import ModelError
from millstream.models.files import check_file
from millstream.models.safetensors_header import StoredTensor, folder_tensors
from millstream.models.safetensors_header import weight_files as safetensors_files

ARCHIVE = "weights.npz"
_TYPES = {"f4": "F32", "f2": "F16", "f8": "F64", "u4": "U32", "i4": "I32", "i8": "I64", "u1": "U8", "b1": "BOOL"}
_MAX_MEMBERS = 10_000
_MAX_HEADER = 4096


def has_archive(folder: Path) -> bool:
    """True if the weights are in an archive alone."""
    return (folder / ARCHIVE).is_file() and not any(folder.glob("*.safetensors"))


def weight_files(folder: Path) -> list[Path]:
    return [folder / ARCHIVE] if has_archive(folder) else safetensors_files(folder)


def whisper_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors by name. Raises `ModelError` for a file that must not be opened."""
    (first, *_) = weight_files(folder)
    return _archive_tensors(first) if first.name == ARCHIVE else folder_tensors(folder)


def _archive_tensors(path: Path) -> dict[str, StoredTensor]:
    check_file(path)
    tensors: dict[str, StoredTensor] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if len(members) > _MAX_MEMBERS:
                raise ModelError(f"{path}: has more than {_MAX_MEMBERS} arrays")
            for member in members:
                with archive.open(member) as file:
                    tensor, offset = _header(path, member.filename, file.read(_MAX_HEADER))
                if offset + tensor.nbytes != member.file_size:
                    raise ModelError(f"{path}: the array {member.filename!r:.120} is damaged: its size is wrong")
                tensors[member.filename.removesuffix(".npy")] = tensor
    except (zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    return tensors


def _header(path: Path, name: str, start: bytes) -> tuple[StoredTensor, int]:
    """The array that a .npy file describes, and where its values begin."""
    damaged = ModelError(f"{path}: the array {name!r:.120} is damaged, or has a type that is not supported")
    match = re.match(rb"\x93NUMPY([\x01-\x03])\x00", start)
    if match is None:
        raise damaged
    size = 2 if match[1] == b"\x01" else 4
    offset = match.end() + size + int.from_bytes(start[match.end() : match.end() + size], "little")
    try:
        described = ast.literal_eval(start[match.end() + size : offset].decode())
        kind, shape = described["descr"].lstrip("<|="), described["shape"]
        dtype, width = _TYPES[kind], int(kind[1:])
    except (ValueError, SyntaxError, LookupError, AttributeError, TypeError, MemoryError, RecursionError) as error:
        raise damaged from error
    if not isinstance(shape, tuple) or not all(type(axis) is int and axis >= 0 for axis in shape):
        raise damaged
    return StoredTensor(dtype, shape, prod(shape) * width), offset
