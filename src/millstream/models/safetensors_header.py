"""Reads the headers of a model folder's safetensors files. Reads no weights.

Every entry is checked against the file's size, because MLX trusts the shapes and would read past the end.
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
"""Bytes per value, by the format's type names."""
_BITS = {name: 8 * size for name, size in FLOATS.items()} | {
    "C64": 64, "I64": 64, "U64": 64, "I32": 32, "U32": 32, "I16": 16, "U16": 16, "I8": 8, "U8": 8, "BOOL": 8,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip

_LENGTH = Struct("<Q")
_MAX_HEADER = 32 * 2**20
"""Bytes. The format allows 100 MB; parsing holds the GIL, for 28 MiB 1.6 s long."""
_MAX_TENSORS = 200_000
"""Per file. An entry takes about 70 bytes of the header and ten times that once it is parsed."""
_MAX_AXES = 16


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as it is stored. `dtype` is the format's name: F32, BF16, U32 and so on."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def values(self) -> int:
        return prod(self.shape)


def folder_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of the model in this folder, by name."""
    tensors: dict[str, StoredTensor] = {}
    for path in weight_files(folder):
        tensors.update(read_header(path))
    return tensors


def loaded_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors that a library would load, also from files that the index does not list: mlx-lm loads every file
    with a name that starts with `model`, and without an index mlx-vlm loads every file."""
    tensors = folder_tensors(folder)
    listed = {path.name for path in weight_files(folder)}
    pattern = "model*.safetensors" if (folder / INDEX).exists() else "*.safetensors"
    for path in sorted(folder.glob(pattern)):
        if path.name not in listed and not path.name.endswith("consolidated.safetensors"):
            tensors.update(read_header(path))
    return tensors


def read_header(path: Path) -> dict[str, StoredTensor]:
    size = check_file(path)
    try:
        with path.open("rb") as file:
            start = file.read(_LENGTH.size)
            length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else size
            end = _LENGTH.size + length
            if end > size:
                raise ModelError(f"{path}: not a safetensors file, or truncated: the header is longer than the file")
            if length > _MAX_HEADER:
                raise ModelError(f"{path}: its header has {length} bytes; at most {_MAX_HEADER} are allowed")
            text = file.read(length)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    if text.count(b"data_offsets") > _MAX_TENSORS:
        raise ModelError(f"{path}: has more than {_MAX_TENSORS} tensors")
    header = parse_object(path, text)
    header.pop("__metadata__", None)
    spans = [_parse_entry(path, name, entry) for name, entry in header.items()]
    _check_spans(path, sorted(spans, key=lambda span: span[:2]), end, size)
    return {name: tensor for _, _, name, tensor in spans}


_Span = tuple[int, int, str, StoredTensor]
"""Start and end offset, name, tensor."""


def _parse_entry(path: Path, name: str, entry: Any) -> _Span:
    """Checks that type and shape give the size of the data offsets."""
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(stop)]}:
            valid = all(type(axis) is int and 0 <= axis < 2**63 for axis in (*shape, begin, stop))
        case _:
            valid = False
    if not valid or stop < begin or len(shape) > _MAX_AXES:
        raise ModelError(f"{path}: the header's entry for {name!r:.120} is damaged")
    bits = _BITS.get(dtype)
    if bits is None:
        raise ModelError(f"{path}: tensor {name!r:.120} has the type {dtype!r:.40}, which is not supported")
    if -(-prod(shape) * bits // 8) != stop - begin:
        raise ModelError(
            f"{path}: the header's entry for {name!r:.120} is damaged: {dtype} values of the shape {shape} "
            f"do not take {stop - begin} bytes"
        )
    return begin, stop, name, StoredTensor(dtype, tuple(shape), stop - begin)


def _check_spans(path: Path, spans: list[_Span], header_end: int, size: int) -> None:
    """Refuses overlapping tensors, which could take more memory than the file has bytes, and a truncated file."""
    last = 0
    for begin, stop, name, tensor in spans:
        if tensor.nbytes and begin < last:
            raise ModelError(f"{path}: the header's entry for {name!r:.120} is damaged: it overlaps another tensor")
        last = max(last, stop)
    if header_end + last > size:
        raise ModelError(
            f"{path}: truncated: the tensors end at byte {header_end + last} but the file has {size}. "
            "Is it an incomplete download?"
        )


def weight_files(folder: Path) -> list[Path]:
    """The files that the index lists. Without an index, those that mlx-lm loads: names that start with `model`."""
    index = folder / INDEX
    if index.is_symlink() or index.exists():
        names = read_object(index).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise ModelError(f"{index}: has no weight_map from tensors to files")
        files = sorted({folder / check_shard_name(index, name) for name in names.values()})
    else:
        files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder}: has no *.safetensors files")
    return files
