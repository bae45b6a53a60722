"""Reads the vocabulary from a GGUF file's metadata, which are untrusted, and checks it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millstream.errors import ModelError

_PREFIX = "tokenizer.ggml."
_MAX_TOKEN_LENGTH = 1024
"""In characters. Long tokens are runs of spaces; building merges splits a token at every position."""
_MAX_CHARACTERS = 16 * 2**20
"""Of all tokens together; Gemma's 260 thousand tokens have less than 2 million."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`types` and `scores` are empty or have one entry per token."""

    tokens: tuple[str, ...]
    types: tuple[int, ...]
    scores: tuple[float, ...]
    merges: tuple[str, ...]


def read_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """Raises `ModelError` with the metadata key; the caller adds the file's name."""
    tokens = _entries(metadata, "tokens", (str,))
    if any(len(token) > _MAX_TOKEN_LENGTH for token in tokens) or sum(map(len, tokens)) > _MAX_CHARACTERS:
        raise ModelError(
            f"'{_PREFIX}tokens' is too long: a token may have at most {_MAX_TOKEN_LENGTH} characters, and all tokens "
            f"together {_MAX_CHARACTERS}"
        )
    vocabulary = Vocabulary(
        tokens,
        _entries(metadata, "token_type", (int,)),
        _entries(metadata, "scores", (int, float)),
        _entries(metadata, "merges", (str,)),
    )
    for key, entries in (("token_type", vocabulary.types), ("scores", vocabulary.scores)):
        if entries and len(entries) != len(tokens):
            raise ModelError(
                f"'{_PREFIX}{key}' has {len(entries)} entries for {len(tokens)} tokens; it must have one per token"
            )
    return vocabulary


def token_id(metadata: Mapping[str, Any], role: str, count: int) -> int | None:
    """The id of the token with this role (`bos`, `eos`, ...). Returns None if the file declares none within range."""
    number = metadata.get(f"{_PREFIX}{role}_token_id")
    if number is None:
        return None
    if not isinstance(number, int) or isinstance(number, bool):
        raise ModelError(f"'{_PREFIX}{role}_token_id' is {number!r:.60}; it must be a token id")
    return number if 0 <= number < count else None


def text_value(metadata: Mapping[str, Any], key: str) -> str | None:
    value = metadata.get(key)
    if value is not None and not isinstance(value, str):
        raise ModelError(f"'{key}' is {value!r:.60}; it must be a string")
    return value


def _entries(metadata: Mapping[str, Any], key: str, kinds: tuple[type, ...]) -> tuple[Any, ...]:
    values = metadata.get(f"{_PREFIX}{key}", [])
    if not isinstance(values, list) or not all(isinstance(each, kinds) for each in values):
        raise ModelError(f"'{_PREFIX}{key}' is damaged: it must be a list of {kinds[-1].__name__} values")
    return tuple(values)
