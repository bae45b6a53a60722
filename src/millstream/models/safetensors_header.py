"""What the safetensors files of a model folder hold, by their headers alone: no weight is read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from struct import Struct
from typing import Any

from millstream.errors import ModelError

INDEX = "model.safetensors.index.json"

_LENGTH = Struct("<Q")
_LARGEST = 100 * 2**20
"""The format's own bound for a header. A longer one is a damaged file."""


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


def read_header(path: Path) -> dict[str, StoredTensor]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(_LENGTH.size)
            length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else size
            end = _LENGTH.size + length
            if end > size or length > _LARGEST:
                raise ModelError(f"{path}: no safetensors file, or cut off: its header does not fit the file")
            text = file.read(length)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    header = parse_object(path, text)
    header.pop("__metadata__", None)
    tensors, data = {}, 0
    for name, entry in header.items():
        try:
            begin, stop = (int(offset) for offset in entry["data_offsets"])
            tensors[name] = StoredTensor(str(entry["dtype"]), tuple(map(int, entry["shape"])), stop - begin)
        except (TypeError, ValueError, KeyError) as error:
            raise ModelError(f"{path}: the header's entry for {name!r} is damaged") from error
        data = max(data, stop)
    if end + data > size:
        raise ModelError(f"{path}: cut off: the tensors end at byte {end + data} and the file has {size}")
    return tensors


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds one object, such as config.json."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    return parse_object(path, text)


def parse_object(path: Path, text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ModelError(f"{path}: holds no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: a JSON object is needed, and it holds a {type(value).__name__}")
    return value


def _files(folder: Path) -> list[Path]:
    """Those that the index names. Without an index, those that mlx-lm reads: a name that starts with `model`."""
    index = folder / INDEX
    if index.is_file():
        names = read_object(index).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise ModelError(f"{index}: has no weight_map from tensors to files")
        files = [folder / name for name in sorted(set(names.values()))]
    else:
        files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder}: has no *.safetensors")
    return files
