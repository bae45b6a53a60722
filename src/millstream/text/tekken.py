"""Mistral's Tekken vocabularies (`tekken.json`): byte pairs by rank, with control tokens before them."""

from __future__ import annotations

import base64
import binascii
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.pre_tokenizers import Split

from millstream.errors import ModelError
from millstream.models.files import read_object

TEKKEN = "tekken.json"
MAX_WORD = 4096
"""Bytes of one word: merging takes time by the square."""


class TekkenVocabulary:
    """Encodes plain text, decodes tokens, and knows control tokens by their names."""

    def __init__(self, ranks: dict[bytes, int], control: dict[str, int], first: int, pattern: str) -> None:
        """`first`: the token of rank 0. Those before it are control tokens, named or not."""
        self._ranks = ranks
        self._pieces = {rank: piece for piece, rank in ranks.items()}
        self._control = control
        self._first = first
        self._words = Split(tokenizers.Regex(pattern), "isolated")

    def encode(self, text: str) -> list[int]:
        """Names of control tokens are text like any other."""
        words = [word.encode() for word, _ in self._words.pre_tokenize_str(text)]
        return [token for word in words for token in self._merged(word)]

    def decode(self, tokens: Sequence[int]) -> str:
        pieces = (self._pieces.get(token - self._first, b"") for token in tokens)
        return b"".join(pieces).decode("utf-8", "replace")

    def token(self, name: str) -> int | None:
        return self._control.get(name)

    def _merged(self, word: bytes) -> list[int]:
        if len(word) > MAX_WORD:
            return [*self._merged(word[:MAX_WORD]), *self._merged(word[MAX_WORD:])]
        parts = [word[place : place + 1] for place in range(len(word))]
        while len(parts) > 1:
            pairs = [self._ranks.get(left + right) for left, right in itertools.pairwise(parts)]
            known = [(rank, place) for place, rank in enumerate(pairs) if rank is not None]
            if not known:
                break
            _, place = min(known)
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        return [self._first + self._ranks[part] for part in parts]


def read_tekken(folder: Path) -> TekkenVocabulary:
    """Raises `ModelError` if the file is not a Tekken vocabulary."""
    path = folder / TEKKEN
    content = read_object(path)
    try:
        config: dict[str, Any] = content["config"]
        first = config["default_num_special_tokens"]
        control = {each["token_str"]: each["rank"] for each in content["special_tokens"]}
        listed = sorted(content["vocab"], key=lambda each: each["rank"])[: config["default_vocab_size"] - first]
        ranks = {base64.b64decode(each["token_bytes"]): each["rank"] for each in listed}
        pattern = config["pattern"]
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise ModelError(f"{path}: is not a Tekken vocabulary with named control tokens: {error}") from error
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise ModelError(f"{path}: lacks tokens for some bytes")
    return TekkenVocabulary(ranks, control, first, pattern)
