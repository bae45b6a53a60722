"""The vocabulary of a GGUF file, read out of its metadata and checked: nothing there need be what it should be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millstream.errors import ModelError

_PREFIX = "tokenizer.ggml."
_LONGEST = 1024
"""Characters of a token. Long ones are runs of spaces; merges are made by cutting a token at every place."""
_MOST_CHARACTERS = 16 * 2**20
"""Of all tokens together; Gemma's 260 thousand have less than 2 million."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`types` and `scores` are empty or have one entry a token."""

    tokens: tuple[str, ...]
    types: tuple[int, ...]
    scores: tuple[float, ...]
    merges: tuple[str, ...]


def read_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """Raises `ModelError` that names the key; the caller knows the file."""
    tokens = _entries(metadata, "tokens", (str,))
    if any(len(token) > _LONGEST for token in tokens) or sum(map(len, tokens)) > _MOST_CHARACTERS:
        raise ModelError(f"'{_PREFIX}tokens' holds text that is too long: a token has at most {_LONGEST} characters")
    found = Vocabulary(
        tokens,
        _entries(metadata, "token_type", (int,)),
        _entries(metadata, "scores", (int, float)),
        _entries(metadata, "merges", (str,)),
    )
    for key, entries in (("token_type", found.types), ("scores", found.scores)):
        if entries and len(entries) != len(tokens):
            raise ModelError(
                f"'{_PREFIX}{key}' has {len(entries)} entries for {len(tokens)} tokens; one each is needed"
            )
    return found


def token_id(metadata: Mapping[str, Any], role: str, count: int) -> int | None:
    """The number of the token that has this role (`bos`, `eos`, ...); None if the file names none of its tokens."""
    number = metadata.get(f"{_PREFIX}{role}_token_id")
    if number is None:
        return None
    if not isinstance(number, int) or isinstance(number, bool):
        raise ModelError(f"'{_PREFIX}{role}_token_id' is {number!r:.60}; the number of a token is needed")
    return number if 0 <= number < count else None


def text_value(metadata: Mapping[str, Any], key: str) -> str | None:
    value = metadata.get(key)
    if value is not None and not isinstance(value, str):
        raise ModelError(f"'{key}' is {value!r:.60}; a text is needed")
    return value


def _entries(metadata: Mapping[str, Any], key: str, kinds: tuple[type, ...]) -> tuple[Any, ...]:
    values = metadata.get(f"{_PREFIX}{key}", [])
    if not isinstance(values, list) or not all(isinstance(each, kinds) for each in values):
        raise ModelError(f"'{_PREFIX}{key}' is damaged: a list of {kinds[-1].__name__} values is needed")
    return tuple(values)
