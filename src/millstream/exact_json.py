"""JSON whose numbers stay as they were written, whatever their size and form: the one way in and out for values that
clients and models make up, such as the arguments of calls and schemas.

Python and orjson would change some of them: 1E5 becomes 100000.0, 1e400 infinity, and an integer past 64 bits a float.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Callable, Iterable
from decimal import Decimal, InvalidOperation
from typing import Any

import orjson

MAX_DEPTH = 200
"""Levels of nesting. Bodies of requests may have half as many."""
_TOO_DEEP = f"it is nested deeper than {MAX_DEPTH} levels"
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_MAX_INT_DIGITS = 4000
"""Python refuses to parse integers of more than 4300."""
_SHAPES = bytes.maketrans(b"123456789.E", b"0000000000e")
_LONG, _FAR = b"0" * 17, b"e000"
"""orjson keeps the value of a number with fewer characters of digits, and with an exponent of at most two digits."""
_MARK = secrets.token_hex(8)
"""Begins strings that stand for numbers. Nobody else knows it."""
_MARKED = re.compile(f'"{_MARK}([-+.0-9eE]+)"')


class Written(float):
    """A number that keeps its text, because Python would write it in another way."""

    __slots__ = ("text",)
    text: str

    def __new__(cls, text: str) -> Written:
        made = super().__new__(cls, text)
        made.text = text
        return made

    def __repr__(self) -> str:
        return self.text

    __str__ = __repr__

    def __reduce__(self) -> tuple[type[Written], tuple[str]]:
        return Written, (self.text,)


def loads(text: str, *, strict: bool = True) -> Any:
    """Parses JSON. Raises `ValueError` if it is none, or nested deeper than what reads and writes values can follow."""
    try:
        value = _loads(text, _float_as_written, strict=strict)
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    if text.count("[") + text.count("{") > MAX_DEPTH and deeper_than(MAX_DEPTH, value):
        raise ValueError(_TOO_DEEP)
    return value


def deeper_than(limit: int, value: object) -> bool:
    """Walks level by level, without recursion, since the input may be hostile."""
    level = [value]
    for _ in range(limit):
        children = [child for node in level for child in _children(node)]
        level = [child for child in children if isinstance(child, dict | list)]
        if not level:
            return False
    return True


def _children(node: object) -> Iterable[object]:
    if isinstance(node, dict):
        return node.values()
    return node if isinstance(node, list) else ()


def first_value(text: str, position: int) -> tuple[Any, int]:
    """Parses the JSON that begins at a position of a text. Returns it and where it ends. Raises `ValueError`."""
    return _VALUES.raw_decode(text, position)


def may_change(raw: bytes) -> bool:
    """True if orjson might change the value of a number in this part of a JSON text. Quick, and seldom wrong."""
    shapes = raw.translate(_SHAPES, b"+-")
    return _LONG in shapes or _FAR in shapes


def loads_values(raw: bytes, *, changes: bool | None = None) -> Any:
    """Parses a large text fast. Its numbers keep their values, but not their forms: 1E5 is 100000.0. `changes`: what
    `may_change` says, if the caller knows. Raises `orjson.JSONDecodeError`."""
    if not (may_change(raw) if changes is None else changes):
        return orjson.loads(raw)
    try:
        value = _loads(raw.decode(), _float_of_value)
        if b"\\u" in raw:
            dumps(value)
    except (ValueError, RecursionError):
        return orjson.loads(raw)  # which says what is wrong: no JSON, or half a surrogate pair
    return value


def dumps(value: object) -> bytes:
    """Writes JSON without spaces. Raises `ValueError` for an unpaired surrogate."""
    try:
        return orjson.dumps(value, default=_fragment)
    except TypeError:  # an integer past 64 bits, or an unpaired surrogate
        return dumps_text(value, ensure_ascii=False, separators=(",", ":")).encode()


def dumps_text(value: object, *, ensure_ascii: bool = False, **options: Any) -> str:
    """Writes JSON as `json.dumps` does, with its options."""
    text = json.dumps(_marked(value), ensure_ascii=ensure_ascii, **options)
    return _MARKED.sub(r"\1", text) if _MARK in text else text


def number(text: str) -> int | float:
    """Returns a number in its own form. One that is not JSON's (007) becomes Python's."""
    found = _NUMBER.fullmatch(text)
    if found is None:
        return int(text) if text.lstrip("-").isdigit() else float(text)
    return _float_as_written(text) if found[1] or found[2] else _integer(text)


def _loads(text: str | bytes, parse_float: Callable[[str], float], *, strict: bool = True) -> Any:
    return json.loads(text, strict=strict, parse_int=_integer, parse_float=parse_float, parse_constant=_refuse)


def _integer(text: str) -> int | float:
    return Written(text) if text == "-0" or len(text) > _MAX_INT_DIGITS else int(text)


def _float_as_written(text: str) -> float:
    value = float(text)
    return value if repr(value) == text else Written(text)


def _float_of_value(text: str) -> float:
    value = float(text)
    try:
        return value if math.isfinite(value) and Decimal(text) == Decimal(repr(value)) else Written(text)
    except InvalidOperation:  # an exponent beyond those of decimal numbers, too
        return Written(text)


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


_VALUES = json.JSONDecoder(parse_int=_integer, parse_float=_float_of_value, parse_constant=_refuse)


def _fragment(value: object) -> orjson.Fragment:
    if isinstance(value, Written):
        return orjson.Fragment(value.text)
    raise TypeError(f"{type(value).__name__} is not JSON")


def _marked(value: object) -> object:
    """Returns a copy with strings in the place of numbers that keep their text."""
    match value:
        case Written():
            return _MARK + value.text
        case dict():
            return {key: _marked(each) for key, each in value.items()}
        case list() | tuple():
            return [_marked(each) for each in value]
        case _:
            return value
