"""Inputs of embedding models: special tokens, truncation, and errors that name the input."""

from __future__ import annotations

import pytest

from millstream.errors import BadRequest, ContextOverflow
from millstream.text.inputs import EncoderTokenizer
from millstream.types import Truncation
from support.encoder_tokenizers import wordpiece

CLS, SEP, UNK, PAD = 2, 3, 1, 0
LONG = "the mill stands by the stream"


@pytest.fixture
def tokenizer() -> EncoderTokenizer:
    backend = wordpiece()
    backend.enable_truncation(4)  # as all-MiniLM's tokenizer.json has them
    backend.enable_padding(length=16, pad_id=PAD)
    return EncoderTokenizer(backend)


def one(
    tokenizer: EncoderTokenizer, text: str | tuple[int, ...], *, limit: int = 64, truncation: Truncation | None = None
) -> list[int]:
    (tokens,) = tokenizer.encode([text], prompt="", limit=limit, truncation=truncation)
    return tokens


def words(tokenizer: EncoderTokenizer, tokens: list[int]) -> str:
    return tokenizer.backend.decode(tokens, skip_special_tokens=False)


def test_the_tokenizers_own_truncation_and_padding_are_off(tokenizer: EncoderTokenizer) -> None:
    assert words(tokenizer, one(tokenizer, LONG)) == f"[CLS] {LONG} [SEP]"


def test_a_prompt_goes_before_each_text_but_not_before_tokens(tokenizer: EncoderTokenizer) -> None:
    text, tokens = tokenizer.encode(["stream", (5, 6)], prompt="the mill ", limit=64, truncation=None)
    assert words(tokenizer, text) == "[CLS] the mill stream [SEP]"
    assert tokens == [5, 6]


@pytest.mark.parametrize(("keep_end", "expected"), [(False, "the mill stands"), (True, "by the stream")])
def test_truncation_keeps_the_special_tokens(tokenizer: EncoderTokenizer, keep_end: bool, expected: str) -> None:
    for truncation, limit in ((Truncation(5, keep_end), 64), (Truncation(None, keep_end), 5)):
        tokens = one(tokenizer, LONG, limit=limit, truncation=truncation)
        assert words(tokenizer, tokens) == f"[CLS] {expected} [SEP]"


@pytest.mark.parametrize(("keep_end", "expected"), [(False, [10, 11]), (True, [12, 13])])
def test_token_lists_are_cut_on_the_same_sides(
    tokenizer: EncoderTokenizer, keep_end: bool, expected: list[int]
) -> None:
    assert one(tokenizer, (10, 11, 12, 13), truncation=Truncation(2, keep_end)) == expected


def test_truncation_never_exceeds_what_the_model_takes(tokenizer: EncoderTokenizer) -> None:
    assert len(one(tokenizer, LONG, limit=5, truncation=Truncation(1000))) == 5


def test_what_looks_like_a_control_token_is_text(tokenizer: EncoderTokenizer) -> None:
    tokens = one(tokenizer, "mill [SEP] stream")
    assert tokens.count(SEP) == 1
    assert tokens[0] == CLS and tokens[-1] == SEP


@pytest.mark.parametrize("text", ["", "🌊🌊 水車 Mühlrad ½", "\x00\u200b", "e\u0301" * 10, "\u202e\ufffe"])
def test_any_unicode_has_tokens(tokenizer: EncoderTokenizer, text: str) -> None:
    tokens = one(tokenizer, text)
    assert (tokens[0], tokens[-1]) == (CLS, SEP)


def test_an_unpaired_surrogate_is_the_callers_mistake(tokenizer: EncoderTokenizer) -> None:
    with pytest.raises(BadRequest, match="input 1 is not valid Unicode"):
        tokenizer.encode(["fine", "\ud800"], prompt="", limit=64, truncation=None)


def test_a_text_that_is_too_long_is_named_with_the_limit_and_the_remedy(tokenizer: EncoderTokenizer) -> None:
    with pytest.raises(
        ContextOverflow, match=r"length is 5 tokens.*input 1 has 8 tokens.*truncate_prompt_tokens"
    ) as error:
        tokenizer.encode(["mill", LONG], prompt="", limit=5, truncation=None)
    assert error.value.param == "input"
    with pytest.raises(ContextOverflow, match="input 0 has 6 tokens"):
        one(tokenizer, tuple(range(6)), limit=5)


def test_a_text_of_many_characters_is_refused_before_it_is_encoded(tokenizer: EncoderTokenizer) -> None:
    with pytest.raises(ContextOverflow, match="input 0 has 1000 characters"):
        one(tokenizer, "x" * 1000, limit=5)


def test_no_tokens_are_refused(tokenizer: EncoderTokenizer) -> None:
    with pytest.raises(BadRequest, match="input 0 is empty"):
        one(tokenizer, ())


def test_without_special_tokens_an_empty_text_is_refused() -> None:
    with pytest.raises(BadRequest, match="input 0 is empty"):
        one(EncoderTokenizer(wordpiece(special=False)), "")
