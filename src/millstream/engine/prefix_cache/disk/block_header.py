"""The header of a block file: serialised, parsed and validated. Pure.

A header from disk is untrusted input: parsing raises ValueError for anything that `Header.text` would not have written.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import pairwise

from millstream.engine.prefix_cache.block_hash import HASH_BYTES, block_hashes

DTYPES = {
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "uint32": ("U32", 4),
    "int32": ("I32", 4),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "uint16": ("U16", 2),
    "int16": ("I16", 2),
    "uint64": ("U64", 8),
    "int64": ("I64", 8),
    "bool": ("BOOL", 1),
}
"""For each dtype its name in the safetensors format and the bytes per element."""
_DTYPE_OF_CODE = {code: name for name, (code, _) in DTYPES.items()}

HEADER_START = '{"__metadata__":{"digest":"'
"""The digest comes first, so that its offset is known before the header is parsed."""
ZERO_DIGEST = "0" * 32

MAX_HEADER_BYTES = 64 << 20
"""The limits below keep every header shorter than this."""
MAX_TOKENS, MAX_CONTENTS, MAX_TENSORS, MAX_EXTRA, MAX_NAME, MAX_AXES = 1 << 20, 1 << 12, 1 << 14, 1 << 20, 256, 8

_FIELDS = {"digest", "stamp", "parent", "end", "block", "tokens", "contents", "extra"}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor in a file: `start` and `end` are offsets into the file's data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """See `block_file.StoredRun`. `stamp` is the identity of the model that computed the blocks."""

    stamp: str
    parent: str
    block: int
    tokens: tuple[int, ...]
    contents: tuple[tuple[int, str], ...]
    extra: str
    tensors: tuple[TensorInfo, ...]

    def __post_init__(self) -> None:
        _check_key(self.parent)
        _check(1 <= self.block <= MAX_TOKENS and 1 <= len(self.tokens) <= MAX_TOKENS, "it has no tokens, or too many")
        _check(all(-(2**31) <= token < 2**31 for token in self.tokens), "a token id does not fit in 32 bits")
        _check(
            len(self.contents) <= MAX_CONTENTS and len(self.extra) <= MAX_EXTRA,
            "its metadata is too long",
        )
        for position, name in self.contents:
            _check(0 <= position < len(self.tokens) and len(name) <= MAX_NAME, "its contents are out of range")
        _check_tensors(self.tensors)

    @property
    def keys(self) -> tuple[str, ...]:
        return block_hashes(self.parent, self.tokens, self.contents, self.block)

    @property
    def data_bytes(self) -> int:
        return self.tensors[-1].end if self.tensors else 0

    def text(self) -> bytes:
        """The header as JSON, with zeros for the digest, padded to a multiple of 8 bytes."""
        metadata = {
            "digest": ZERO_DIGEST,
            "stamp": self.stamp,
            "parent": self.parent,
            "end": self.keys[-1],
            "block": str(self.block),
            "tokens": _dumps(self.tokens),
            "contents": _dumps(self.contents),
            "extra": self.extra,
        }
        document: dict[str, object] = {"__metadata__": metadata}
        for info in self.tensors:
            code = DTYPES[info.dtype][0]
            document[info.name] = {"dtype": code, "shape": info.shape, "data_offsets": (info.start, info.end)}
        text = _dumps(document).encode()
        return text + b" " * (-len(text) % 8)


def parse_header(text: bytes) -> Header:
    """Parse and validate a header. Raises ValueError. The digest covers the whole file, so it is not verified here."""
    _check(text.startswith(HEADER_START.encode()), "it is not a block file")
    document = _object(_loads(text.decode()))
    fields = {name: _text(value) for name, value in _object(document.pop("__metadata__")).items()}
    _check(fields.keys() == _FIELDS, "its metadata has missing or unknown fields")
    tokens = tuple(_number(token) for token in _array(_loads(fields["tokens"])))
    contents = tuple(_content(pair) for pair in _array(_loads(fields["contents"])))
    tensors = tuple(_tensor_info(name, value) for name, value in document.items())
    block = _number(_loads(fields["block"]))
    header = Header(fields["stamp"], fields["parent"], block, tokens, contents, fields["extra"], tensors)
    _check(header.keys[-1] == fields["end"], "its tokens do not match its block hash")
    return header


def _check(valid: bool, message: str) -> None:
    if not valid:
        raise ValueError(message)


def _check_key(key: str) -> None:
    # `fromhex` also accepts spaces and capitals.
    _check(len(key) == 2 * HASH_BYTES and bytes.fromhex(key).hex() == key, "its parent is not a block hash")


def _check_tensors(tensors: tuple[TensorInfo, ...]) -> None:
    """Tensors are contiguous, and the size of each is that of its shape and dtype."""
    _check(len(tensors) <= MAX_TENSORS, "it has too many tensors")
    _check(len({info.name for info in tensors} - {"__metadata__"}) == len(tensors), "two tensors have the same name")
    for info in tensors:
        _check(len(info.name) <= MAX_NAME and info.dtype in DTYPES, f"a tensor has the dtype {info.dtype[:20]!r}")
        _check(len(info.shape) <= MAX_AXES and all(0 <= axis < 2**48 for axis in info.shape), "a shape is not valid")
        size = math.prod(info.shape) * DTYPES[info.dtype][1]
        _check(info.end - info.start == size, "the size of a tensor does not match its shape")
    _check(not tensors or tensors[0].start == 0, "its data starts with a gap")
    _check(all(one.end == other.start for one, other in pairwise(tensors)), "its data has gaps")


def _tensor_info(name: str, value: object) -> TensorInfo:
    fields = _object(value)
    _check(fields.keys() == {"dtype", "shape", "data_offsets"}, "a tensor has missing or unknown fields")
    code = _text(fields["dtype"])
    _check(code in _DTYPE_OF_CODE, f"a tensor has the dtype {code[:20]!r}")
    offsets = [_number(offset) for offset in _array(fields["data_offsets"])]
    _check(len(offsets) == 2, "a tensor must have two offsets")
    return TensorInfo(name, _DTYPE_OF_CODE[code], tuple(_number(axis) for axis in _array(fields["shape"])), *offsets)


def _content(value: object) -> tuple[int, str]:
    pair = _array(value)
    _check(len(pair) == 2, "contents must be pairs")
    return _number(pair[0]), _text(pair[1])


def _dumps(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _loads(text: str) -> object:
    try:
        value: object = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return value


def _object(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ValueError("expected a JSON object")
    return value


def _array(value: object) -> list[object]:
    if not isinstance(value, list):
        raise ValueError("expected a JSON array")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("expected a string")
    return value


def _number(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError("expected an integer")
    return value
