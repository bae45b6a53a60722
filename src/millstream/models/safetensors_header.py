"""What the safetensors files of a model folder hold, by their headers alone: no weight is read.

Every entry is checked against the file's size here, since MLX believes the shapes: it would read past the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from struct import Struct
from typing import Any

from millstream.errors import ModelError
from millstream.models.files import check_file, parse_object, read_object
from millstream.models.trust import check_shard_name

INDEX = "model.safetensors.index.json"

FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes of a number, by the format's names."""
_BITS = {name: 8 * size for name, size in FLOATS.items()} | {
    "C64": 64, "I64": 64, "U64": 64, "I32": 32, "U32": 32, "I16": 16, "U16": 16, "I8": 8, "U8": 8, "BOOL": 8,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip

_LENGTH = Struct("<Q")
_LARGEST = 32 * 2**20
"""Bytes of a header. The format allows 100 MB; parsing holds the interpreter's lock, 28 MiB for 1.6 s."""
_MOST_TENSORS = 200_000
"""In one file. An entry takes some 70 bytes of a header and ten times that once it is read."""
_MOST_AXES = 16


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as it lies in the file. `dtype` has the format's name for it: F32, BF16, U32 and so on."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def values(self) -> int:
        return prod(self.shape)


def folder_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the model in this folder, by name."""
    found: dict[str, StoredTensor] = {}
    for path in _files(folder):
        found.update(read_header(path))
    return found


def loaded_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The same with those that no index names: mlx-lm reads all files whose name starts with `model`, and without an
    index mlx-vlm reads whatever is there."""
    found = folder_tensors(folder)
    named = {path.name for path in _files(folder)}
    pattern = "model*.safetensors" if (folder / INDEX).exists() else "*.safetensors"
    for path in sorted(folder.glob(pattern)):
        if path.name not in named and not path.name.endswith("consolidated.safetensors"):
            found.update(read_header(path))
    return found


def read_header(path: Path) -> dict[str, StoredTensor]:
    size = check_file(path)
    try:
        with path.open("rb") as file:
            start = file.read(_LENGTH.size)
            length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else size
            end = _LENGTH.size + length
            if end > size:
                raise ModelError(f"{path}: no safetensors file, or cut off: its header does not fit the file")
            if length > _LARGEST:
                raise ModelError(f"{path}: its header has {length} bytes; at most {_LARGEST} are read")
            text = file.read(length)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    if text.count(b"data_offsets") > _MOST_TENSORS:
        raise ModelError(f"{path}: has more than {_MOST_TENSORS} tensors")
    header = parse_object(path, text)
    header.pop("__metadata__", None)
    places = [_place(path, name, entry) for name, entry in header.items()]
    _check_places(path, sorted(places, key=lambda place: place[:2]), end, size)
    return {name: tensor for _, _, name, tensor in places}


_Place = tuple[int, int, str, StoredTensor]


def _place(path: Path, name: str, entry: Any) -> _Place:
    """Where a tensor begins and ends, and what it is. The size of its type and shape must be the one of its place."""
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(stop)]}:
            whole = all(type(axis) is int and 0 <= axis < 2**63 for axis in (*shape, begin, stop))
        case _:
            whole = False
    if not whole or stop < begin or len(shape) > _MOST_AXES:
        raise ModelError(f"{path}: the header's entry for {name!r:.120} is damaged")
    bits = _BITS.get(dtype)
    if bits is None:
        raise ModelError(f"{path}: tensor {name!r:.120} has the type {dtype!r:.40}, which is not known")
    if -(-prod(shape) * bits // 8) != stop - begin:
        raise ModelError(
            f"{path}: the header's entry for {name!r:.120} is damaged: {dtype} values of the shape {shape} "
            f"do not take {stop - begin} bytes"
        )
    return begin, stop, name, StoredTensor(dtype, tuple(shape), stop - begin)


def _check_places(path: Path, places: list[_Place], end: int, size: int) -> None:
    """`end`: of the header. Tensors that share bytes would take more memory than the file has."""
    last = 0
    for begin, stop, name, tensor in places:
        if tensor.nbytes and begin < last:
            raise ModelError(f"{path}: the header's entry for {name!r:.120} is damaged: it overlaps another tensor")
        last = max(last, stop)
    if end + last > size:
        raise ModelError(
            f"{path}: cut off: the tensors end at byte {end + last} and the file has {size}: an incomplete download?"
        )


def _files(folder: Path) -> list[Path]:
    """Those that the index names. Without an index, those that mlx-lm reads: a name that starts with `model`."""
    index = folder / INDEX
    if index.is_symlink() or index.exists():
        names = read_object(index).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise ModelError(f"{index}: has no weight_map from tensors to files")
        files = sorted({folder / check_shard_name(index, name) for name in names.values()})
    else:
        files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder}: has no *.safetensors")
    return files
