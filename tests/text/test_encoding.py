"""Texts are encoded only as far as their tokens are wanted."""

from __future__ import annotations

import random
from typing import Any

import pytest
from small_tokenizers import SENTENCES, byte_fallback, byte_level, word_piece
from tokenizers import Tokenizer

from millstream.errors import BadRequest, ContextOverflow
from millstream.text.encoding import encode_part
from millstream.text.inputs import EncoderTokenizer
from millstream.text.pairs import CrossEncoderPairs, PairEncoder, YesNoPairs
from millstream.types import Truncation
from support.encoder_tokenizers import chat_bytes, wordpiece

LIMIT = 64


class Counted:
    """A tokenizer that counts the characters that it encodes."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self.characters = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.characters += sum(map(len, texts))
        return self._backend.encode_batch_fast(texts, **options)


@pytest.mark.parametrize("make", [byte_level, byte_fallback, word_piece, wordpiece, chat_bytes])
@pytest.mark.parametrize("end", [False, True])
def test_a_part_has_the_tokens_of_the_whole(make: Any, end: bool) -> None:
    backend, draw = make(), random.Random(3)
    texts = [" ".join(draw.choices(SENTENCES, k=draw.randint(1, 30))) for _ in range(10)]
    for text in [*texts, "", "x" * 5000, " " * 5000, "水" * 3000]:
        (whole,) = backend.encode_batch_fast([text], add_special_tokens=False)
        for most in (1, 7, 100):
            part = encode_part(backend, text, most, end=end).ids
            kept = slice(-most, None) if end else slice(most)
            assert part[kept] == whole.ids[kept]


def pairs_of(kind: type[CrossEncoderPairs | YesNoPairs]) -> tuple[PairEncoder, Counted]:
    counted = Counted(wordpiece() if kind is CrossEncoderPairs else chat_bytes())
    return kind(counted), counted  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [CrossEncoderPairs, YesNoPairs])
def test_a_query_is_encoded_once_and_a_document_as_far_as_it_is_read(kind: Any) -> None:
    pairs, counted = pairs_of(kind)
    asked = [("mill", "the mill stands " * 10_000)] * 20
    encoded = pairs.encode(asked, limit=1024, document_limit=LIMIT, instruction=None)
    assert counted.characters < 20 * 16 * LIMIT < len(asked[0][1])
    assert all(each == encoded[0] for each in encoded)


@pytest.mark.parametrize("kind", [CrossEncoderPairs, YesNoPairs])
def test_a_query_that_is_surely_too_long_is_not_encoded(kind: Any) -> None:
    pairs, counted = pairs_of(kind)
    with pytest.raises(BadRequest, match=r"the query has \d+ characters; this model takes \d+ tokens"):
        pairs.encode([("mill " * 100_000, "a")] * 10, limit=1024, document_limit=None, instruction=None)
    assert counted.characters == 0


def test_an_input_is_encoded_as_far_as_it_is_read() -> None:
    counted = Counted(wordpiece())
    tokenizer = EncoderTokenizer(counted)  # type: ignore[arg-type]
    text = "the mill stands " * 10_000
    with pytest.raises(ContextOverflow, match="160000 characters"):
        tokenizer.encode([text], prompt="", limit=LIMIT, truncation=None)
    assert counted.characters == 0
    for keep_end in (False, True):
        (tokens,) = tokenizer.encode([text], prompt="", limit=LIMIT, truncation=Truncation(None, keep_end))
        assert len(tokens) == LIMIT
    assert counted.characters < 2 * 16 * LIMIT
