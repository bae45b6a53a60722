"""The header of a file of blocks: what it says, whether that can be true, and its text. Pure.

Nothing in a header is taken on trust. What `text` would not have written raises ValueError.
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
"""The format's name and the bytes of one element."""
_NAMES = {code: name for name, (code, _) in DTYPES.items()}

OPENING = '{"__metadata__":{"digest":"'
"""The digest comes first, so that its place in a file is known before anything is understood."""
NO_DIGEST = "0" * 32

MOST_HEADER = 64 << 20
"""Bytes. The figures below keep every header shorter than that."""
MOST_TOKENS, MOST_CONTENTS, MOST_TENSORS, MOST_EXTRA, MOST_NAME, MOST_AXES = 1 << 20, 1 << 12, 1 << 14, 1 << 20, 256, 8


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor is in a file's data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself."""

    stamp: str
    parent: str
    block: int
    tokens: tuple[int, ...]
    contents: tuple[tuple[int, str], ...]
    extra: str
    places: tuple[Place, ...]

    def __post_init__(self) -> None:
        _check_key(self.parent)
        _check(1 <= self.block <= MOST_TOKENS and 1 <= len(self.tokens) <= MOST_TOKENS, "no tokens, or too many")
        _check(all(-(2**31) <= token < 2**31 for token in self.tokens), "a token is no token")
        _check(len(self.contents) <= MOST_CONTENTS and len(self.extra) <= MOST_EXTRA, "too much besides the tokens")
        for place, name in self.contents:
            _check(0 <= place < len(self.tokens) and len(name) <= MOST_NAME, "contents at no place")
        _check_places(self.places)

    @property
    def keys(self) -> tuple[str, ...]:
        return block_hashes(self.parent, self.tokens, self.contents, self.block)

    @property
    def data_bytes(self) -> int:
        return self.places[-1].end if self.places else 0

    def text(self) -> bytes:
        """As it stands in a file, with zeros for the digest."""
        metadata = {
            "digest": NO_DIGEST,
            "stamp": self.stamp,
            "parent": self.parent,
            "end": self.keys[-1],
            "block": str(self.block),
            "tokens": _dumps(self.tokens),
            "contents": _dumps(self.contents),
            "extra": self.extra,
        }
        described: dict[str, object] = {"__metadata__": metadata}
        for place in self.places:
            code = DTYPES[place.dtype][0]
            described[place.name] = {"dtype": code, "shape": place.shape, "data_offsets": (place.start, place.end)}
        text = _dumps(described).encode()
        return text + b" " * (-len(text) % 8)


def parse_header(text: bytes) -> Header:
    """Raises ValueError. The digest is not looked at, nor can it be: it is over the whole file."""
    _check(text.startswith(OPENING.encode()), "not one of ours")
    described = _object(_loads(text.decode()))
    said = {name: _text(value) for name, value in _object(described.pop("__metadata__")).items()}
    _check(said.keys() == {"digest", "stamp", "parent", "end", "block", "tokens", "contents", "extra"}, "other fields")
    tokens = tuple(_number(token) for token in _array(_loads(said["tokens"])))
    contents = tuple(_content(pair) for pair in _array(_loads(said["contents"])))
    places = tuple(_place(name, value) for name, value in described.items())
    block = _number(_loads(said["block"]))
    header = Header(said["stamp"], said["parent"], block, tokens, contents, said["extra"], places)
    _check(header.keys[-1] == said["end"], "the tokens are not those of its key")
    return header


def _check(true: bool, otherwise: str) -> None:
    if not true:
        raise ValueError(otherwise)


def _check_key(key: str) -> None:
    # `fromhex` takes blanks and capitals as well.
    _check(len(key) == 2 * HASH_BYTES and bytes.fromhex(key).hex() == key, "a key is no key")


def _check_places(places: tuple[Place, ...]) -> None:
    """One after the other without a gap, each as long as its shape says."""
    _check(len(places) <= MOST_TENSORS, "too many tensors")
    _check(len({place.name for place in places} - {"__metadata__"}) == len(places), "two tensors have one name")
    for place in places:
        _check(len(place.name) <= MOST_NAME and place.dtype in DTYPES, f"a tensor of {place.dtype[:20]!r}")
        _check(len(place.shape) <= MOST_AXES and all(0 <= axis < 2**48 for axis in place.shape), "a wrong shape")
        size = math.prod(place.shape) * DTYPES[place.dtype][1]
        _check(place.end - place.start == size, "a tensor is not as long as its shape says")
    _check(not places or places[0].start == 0, "data begins with a gap")
    _check(all(one.end == other.start for one, other in pairwise(places)), "data has gaps")


def _place(name: str, value: object) -> Place:
    said = _object(value)
    _check(said.keys() == {"dtype", "shape", "data_offsets"}, "a tensor has other fields")
    code = _text(said["dtype"])
    _check(code in _NAMES, f"a tensor of {code[:20]!r}")
    offsets = [_number(offset) for offset in _array(said["data_offsets"])]
    _check(len(offsets) == 2, "a tensor has a beginning and an end")
    return Place(name, _NAMES[code], tuple(_number(axis) for axis in _array(said["shape"])), *offsets)


def _content(value: object) -> tuple[int, str]:
    pair = _array(value)
    _check(len(pair) == 2, "contents are pairs")
    return _number(pair[0]), _text(pair[1])


def _dumps(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _loads(text: str) -> object:
    try:
        value: object = json.loads(text)
    except RecursionError as error:
        raise ValueError("too deep") from error
    return value


def _object(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ValueError("an object is missing")
    return value


def _array(value: object) -> list[object]:
    if not isinstance(value, list):
        raise ValueError("an array is missing")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("a text is missing")
    return value


def _number(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError("a whole number is missing")
    return value
