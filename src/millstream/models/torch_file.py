"""Reads tensors from PyTorch's files without PyTorch, and without running anything that they name.

Such a file is a zip archive: a pickle that describes tensors, and their bytes. A pickle may call any function that it
names. Here it may name three things: an ordered dictionary, the types of storages, and the function that puts a tensor
together, which is replaced by one of our own.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millstream.errors import ModelError
from millstream.models.files import check_file
from millstream.models.safetensors_header import StoredTensor

_TYPES = {
    "FloatStorage": ("F32", "<f4"),
    "HalfStorage": ("F16", "<f2"),
    "BFloat16Storage": ("BF16", "<u2"),
    "DoubleStorage": ("F64", "<f8"),
    "LongStorage": ("I64", "<i8"),
    "IntStorage": ("I32", "<i4"),
    "BoolStorage": ("BOOL", "|b1"),
}
_MAX_PICKLE = 8 * 2**20
_MAX_DEPTH = 8
_DAMAGED = (
    pickle.UnpicklingError, zipfile.BadZipFile, OSError, EOFError, ValueError, TypeError, LookupError, AttributeError,
    NotImplementedError, RuntimeError, MemoryError, OverflowError,
)  # fmt: skip
"""What a damaged archive or pickle can raise."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    kind: str
    key: str
    """The name of its storage in the archive."""
    offset: int
    shape: tuple[int, ...]

    @property
    def values(self) -> int:
        return prod(self.shape)


class TorchFile:
    """The tensors of a file by name: those of dictionaries within dictionaries are joined by points."""

    def __init__(self, path: Path) -> None:
        """Reads the description alone. Raises `ModelError` if the file is damaged or names anything else."""
        check_file(path)
        self._path = path
        try:
            with zipfile.ZipFile(path) as archive:
                self._members = {member.filename: member for member in archive.infolist()}
                described = next(name for name in self._members if name.endswith("/data.pkl"))
                self._root = described.removesuffix("data.pkl")
                if self._members[described].file_size > _MAX_PICKLE:
                    raise ModelError(f"{path}: its description has more than {_MAX_PICKLE // 2**20} MiB")
                value = _Reader(io.BytesIO(archive.read(described))).load()
            self._tensors = dict(_flat(value))
            for name, tensor in self._tensors.items():
                self._check(name, tensor)
        except (*_DAMAGED, StopIteration) as error:
            raise ModelError(f"{path}: is not a file of PyTorch's tensors that can be read: {error}") from error

    @property
    def stored(self) -> dict[str, StoredTensor]:
        return {
            name: StoredTensor(_TYPES[each.kind][0], each.shape, each.values * _width(each.kind))
            for name, each in self._tensors.items()
        }

    def read(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """Name and values of each tensor. bfloat16 becomes float32, which NumPy has."""
        try:
            with zipfile.ZipFile(self._path) as archive:
                for name, tensor in self._tensors.items():
                    data = archive.read(f"{self._root}data/{tensor.key}")
                    code = _TYPES[tensor.kind][1]
                    values = np.frombuffer(data, code, tensor.values, tensor.offset * _width(tensor.kind))
                    if tensor.kind == "BFloat16Storage":
                        values = (values.astype(np.uint32) << 16).view(np.float32)
                    yield name, values.reshape(tensor.shape)
        except _DAMAGED as error:
            raise ModelError(f"{self._path}: cannot be read: {error}") from error

    def _check(self, name: str, tensor: _Tensor) -> None:
        member = self._members.get(f"{self._root}data/{tensor.key}")
        if member is None or member.compress_type != zipfile.ZIP_STORED:
            raise ModelError(f"{self._path}: the values of {name!r:.120} are missing or compressed")
        if (tensor.offset + tensor.values) * _width(tensor.kind) > member.file_size:
            raise ModelError(f"{self._path}: the values of {name!r:.120} are truncated")


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _tensor
        if module == "torch" and name in _TYPES:
            return name
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not a tensor")

    def persistent_load(self, pid: Any) -> tuple[str, str]:
        kind, storage, key, *_ = pid
        if kind != "storage" or storage not in _TYPES or not str(key).isalnum():
            raise pickle.UnpicklingError("it names a storage that is not one of a tensor")
        return storage, str(key)


def _tensor(storage: tuple[str, str], offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> _Tensor:
    kind, key = storage
    sizes = tuple(shape)
    if not all(type(number) is int and number >= 0 for number in (offset, *sizes)):
        raise pickle.UnpicklingError("a tensor has a damaged shape")
    wanted = tuple(prod(sizes[axis + 1 :]) for axis in range(len(sizes)))
    if any(size > 1 and had != right for size, had, right in zip(sizes, stride, wanted, strict=True)):
        raise pickle.UnpicklingError("a tensor is not contiguous")
    return _Tensor(kind, key, offset, sizes)


def _flat(value: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, _Tensor]]:
    if isinstance(value, _Tensor):
        yield prefix, value
    elif isinstance(value, Mapping) and depth < _MAX_DEPTH:
        for name, each in value.items():
            yield from _flat(each, f"{prefix}.{name}" if prefix else str(name), depth + 1)


def _width(kind: str) -> int:
    return np.dtype(_TYPES[kind][1]).itemsize
