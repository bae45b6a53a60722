"""Opens a GGUF file: metadata as plain values, tensors as views of the memory-mapped file.

The header is parsed here and not by the `gguf` package's reader, which makes a NumPy view of every array element: that
takes 17 s for a vocabulary of 150 thousand tokens, and 42 s and 1.9 GB for one of 260 thousand. Types, block sizes and
dequantisation come from the package.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from millstream.errors import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_U32, _U64 = Struct("<I"), Struct("<Q")
_VERSIONS = (2, 3)
_MAX_STRING = 16 * 2**20
_MAX_ENTRIES = 8_000_000
"""Of all arrays in the metadata together; a vocabulary of a million tokens has 4 million. Each takes about 60 bytes."""
_MAX_TENSORS = 100_000
_MAX_AXIS = 2**31 - 1
_NUMPY_TYPES = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor. `shape` has the slowest axis first, as in NumPy and MLX; GGUF stores the reverse order.

    `data` has the tensor's element type if NumPy has it; otherwise it is bytes: the quantised blocks of each row.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    data: npt.NDArray[Any]

    def floats(self) -> npt.NDArray[np.float32]:
        """The dequantised values. Per tensor: a whole dequantised file may not fit into memory."""
        try:
            values = dequantize(self.data, GGMLQuantizationType[self.kind])
        except NotImplementedError as error:
            raise ModelError(f"tensor {self.name!r} has type {self.kind}, which cannot be dequantised.") from error
        return np.asarray(values, dtype=np.float32).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class GgufFile:
    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def hyper(self, key: str, default: Any = None) -> Any:
        """A hyperparameter, by its key in the architecture's section: `hyper("block_count")` is `llama.block_count`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


def open_gguf(path: Path | str) -> GgufFile:
    """Map the file and parse its header. Tensor data is read from disk when it is first accessed."""
    path = Path(path)
    try:
        data = np.memmap(path, dtype=np.uint8, mode="r")
    except OSError as error:
        raise ModelError(f"{path}: cannot be opened ({error.strerror}). It must be a readable .gguf file.") from error
    except ValueError as error:
        raise ModelError(f"{path}: the file is empty. It must be a complete .gguf file.") from error
    header = _Header(path, data.data)
    tensor_count, value_count = header.start()
    metadata = dict(header.values(value_count))
    parts = metadata.get("split.count")
    if parts not in (None, 0, 1):
        raise ModelError(f"{path}: is one of {parts} parts. Join the parts into one .gguf file first.")
    if tensor_count > _MAX_TENSORS:
        raise ModelError(f"{path}: the header declares {tensor_count} tensors; at most {_MAX_TENSORS} are supported.")
    infos = list(header.tensor_infos(tensor_count))
    first = header.align(metadata.get("general.alignment", 32))
    return GgufFile(path, metadata, _tensors(path, data, first, infos))


class _Header:
    """A cursor over the header. Every read is checked against the end of the file, to detect a truncated one."""

    def __init__(self, path: Path, view: memoryview) -> None:
        self._path = path
        self._view = view
        self._at = 0
        self._entries = 0

    def start(self) -> tuple[int, int]:
        """Check magic and version. Returns the numbers of tensors and of metadata values."""
        if bytes(self._view[:4]) != b"GGUF":
            raise ModelError(f"{self._path}: not a GGUF file. A GGUF file starts with the four bytes 'GGUF'.")
        self._skip(4)
        version = self._number(_U32)
        if version & 0xFFFF == 0:
            raise ModelError(f"{self._path}: the file is big-endian. It must be a little-endian GGUF file.")
        if version not in _VERSIONS:
            raise ModelError(f"{self._path}: GGUF version {version} is not supported. Versions 2 and 3 are.")
        return self._number(_U64), self._number(_U64)

    def values(self, count: int) -> Iterator[tuple[str, Any]]:
        for _ in range(count):
            yield self._string(), self._value(self._number(_U32))

    def tensor_infos(self, count: int) -> Iterator[_Info]:
        """For each tensor: name, type, shape (slowest axis first) and offset from the start of the tensor data."""
        for _ in range(count):
            name = self._string()
            axes = self._number(_U32)
            if axes > 4:
                raise ModelError(
                    f"{self._path}: tensor {name!r:.120} has {axes} axes; GGUF allows 4. The file is damaged."
                )
            shape = tuple(self._number(_U64) for _ in range(axes))[::-1]
            if not all(0 < axis <= _MAX_AXIS for axis in shape):
                raise ModelError(
                    f"{self._path}: tensor {name!r:.120} has the shape {list(shape)}. The file is damaged."
                )
            yield name, self._number(_U32), shape, self._number(_U64)

    def align(self, alignment: Any) -> int:
        """The offset of the tensor data."""
        if type(alignment) is not int or alignment <= 0:
            raise ModelError(f"{self._path}: general.alignment is {alignment!r:.60}; it must be a positive number.")
        return -(-self._at // alignment) * alignment

    def _skip(self, size: int) -> int:
        """Move past `size` bytes. Returns their offset."""
        start, end = self._at, self._at + size
        if end > len(self._view):
            raise ModelError(
                f"{self._path}: truncated: the header continues past the file's {len(self._view)} bytes. "
                "It must be a complete .gguf file (was a download interrupted?)."
            )
        self._at = end
        return start

    def _number(self, form: Struct) -> int:
        return int(form.unpack_from(self._view, self._skip(form.size))[0])

    def _string(self) -> str:
        size = self._number(_U64)
        start = self._skip(size)
        if size > _MAX_STRING:
            raise ModelError(
                f"{self._path}: the metadata have a string of {size} bytes; at most {_MAX_STRING} are allowed."
            )
        return str(self._view[start : start + size], "utf-8", "replace")

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY and depth < 3:
            return self._array(self._number(_U32), self._number(_U64), depth + 1)
        if kind not in _SCALARS:
            raise ModelError(
                f"{self._path}: metadata of unknown type {kind}. The file is damaged or newer than GGUF 3."
            )
        form = Struct("<" + _SCALARS[kind])
        return form.unpack_from(self._view, self._skip(form.size))[0]

    def _array(self, kind: int, count: int, depth: int) -> list[Any]:
        self._entries += count
        if self._entries > _MAX_ENTRIES:
            raise ModelError(
                f"{self._path}: the metadata arrays have {self._entries} entries; at most {_MAX_ENTRIES} are allowed."
            )
        if kind not in _SCALARS:
            return [self._value(kind, depth) for _ in range(count)]
        dtype = np.dtype("<" + _SCALARS[kind])
        start = self._skip(dtype.itemsize * count)
        return list(np.frombuffer(self._view, dtype, count, start).tolist())


_Info = tuple[str, int, tuple[int, ...], int]


def _tensors(path: Path, data: npt.NDArray[np.uint8], first: int, infos: list[_Info]) -> dict[str, GgufTensor]:
    """By name. Duplicate names and overlapping tensors are refused: a small file could otherwise declare any amount of
    data."""
    found: dict[str, GgufTensor] = {}
    end = 0
    for info in sorted(infos, key=lambda info: info[3]):
        name, offset = info[0], info[3]
        if name in found:
            raise ModelError(f"{path}: has two tensors named {name!r:.120}. The file is damaged.")
        if offset < end:
            raise ModelError(f"{path}: tensor {name!r:.120} overlaps another. The file is damaged.")
        found[name] = _tensor(path, data, first, *info)
        end = offset + found[name].data.nbytes
    return {info[0]: found[info[0]] for info in infos}


def _tensor(
    path: Path, data: npt.NDArray[np.uint8], first: int, name: str, kind: int, shape: tuple[int, ...], offset: int
) -> GgufTensor:
    """The view of one tensor's bytes, checked against the end of the file."""
    if kind not in list(GGMLQuantizationType):
        raise ModelError(
            f"{path}: tensor {name!r} has type {kind}, which the installed version of the gguf package does not know."
        )
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    row = shape[-1] if shape else 1
    if row % block:
        raise ModelError(
            f"{path}: tensor {name!r} has rows of {row} values; for its type they must be a multiple of {block}."
        )
    width = row // block * size
    start = first + offset
    end = start + width * prod(shape[:-1])
    if end > len(data):
        raise ModelError(
            f"{path}: truncated: tensor {name!r} ends at byte {end} but the file has {len(data)}. "
            "It must be a complete .gguf file (was a download interrupted?)."
        )
    raw = data[start:end].reshape(*shape[:-1], width)
    kind_name = str(GGMLQuantizationType(kind).name)
    dtype = _NUMPY_TYPES.get(kind_name)
    return GgufTensor(name, kind_name, shape, raw if dtype is None else _typed(raw, dtype))


def _typed(raw: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[Any]:
    return np.asarray(raw).view(dtype)
