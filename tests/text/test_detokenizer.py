"""Detokenizers: the same text however tokens are batched, whole characters only, special tokens skipped."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import SENTENCES, byte_fallback, byte_level, word_piece
from tokenizers import decoders

from millstream.text.detokenizer import ByteScheme, byte_scheme, decoder_config
from millstream.text.tokenizer import Tokenizer

KINDS = {
    "level": byte_level,
    "fallback": byte_fallback,
    "unstripped": lambda: byte_fallback(strip=False),
    "words": word_piece,
}


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    return Tokenizer(KINDS[kind]())


def split(ids: list[int], cuts: list[int]) -> list[list[int]]:
    positions = sorted(cut % (len(ids) + 1) for cut in cuts)
    return [ids[a:b] for a, b in zip([0, *positions], [*positions, len(ids)], strict=True)]


@pytest.mark.parametrize("kind", KINDS)
@given(tokens=st.lists(st.integers(0, 500), max_size=30), cuts=st.lists(st.integers(0, 99), max_size=6))
def test_any_split_of_any_tokens_gives_the_text_of_the_whole(kind: str, tokens: list[int], cuts: list[int]) -> None:
    tokenizer = tokenizer_of(kind)
    stream = tokenizer.detokenizer()
    parts = [stream.push(chunk) for chunk in split(tokens, cuts)]
    assert "".join(parts) + stream.finish() == tokenizer.decode(tokens)


@given(st.lists(st.integers(0, 420), max_size=30))
def test_byte_level_agrees_with_the_library_for_any_tokens(tokens: list[int]) -> None:
    assert tokenizer_of("level").decode(tokens) == byte_level().decode(tokens)


@given(st.lists(st.integers(0, 7), max_size=12))
def test_words_agree_with_the_library_for_any_tokens(tokens: list[int]) -> None:
    assert tokenizer_of("words").decode(tokens) == word_piece().decode(tokens)


@pytest.mark.parametrize("kind", ["fallback", "unstripped"])
@given(text=st.text(max_size=30))
def test_byte_fallback_agrees_with_the_library_for_any_text(kind: str, text: str) -> None:
    backend = KINDS[kind]()
    ids = backend.encode(text).ids
    assert tokenizer_of(kind).decode(ids) == backend.decode(ids)


@pytest.mark.parametrize("kind", ["level", "fallback", "unstripped"])
@pytest.mark.parametrize("text", SENTENCES)
def test_only_whole_characters_come_out(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    stream = tokenizer.detokenizer()
    out = ""
    for token in tokenizer.encode(text):
        out += stream.push([token])
        assert text.startswith(out)
    assert out == text
    assert stream.finish() == ""


@pytest.mark.parametrize("kind", ["level", "fallback"])
def test_a_character_that_stays_incomplete_is_marked_at_the_end(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    tokens = [token for token in range(tokenizer.vocab_size) if tokenizer.token_bytes(token) in (b"\xf0", b"\x9f")]
    first, second = sorted(tokens, key=tokenizer.token_bytes, reverse=True)
    stream = tokenizer.detokenizer()
    assert stream.push([first, second]) == ""
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_invalid_bytes_come_out_at_once() -> None:
    tokenizer = tokenizer_of("level")
    bad = next(token for token in range(tokenizer.vocab_size) if tokenizer.token_bytes(token) == b"\xff")
    assert tokenizer.detokenizer().push([bad] * 100) == "\ufffd" * 100


def test_special_tokens_are_skipped_and_added_ones_are_not() -> None:
    tokenizer, backend = tokenizer_of("level"), byte_level()
    assert tokenizer.detokenizer().push([backend.token_to_id("<|end|>"), backend.token_to_id("<think>")]) == "<think>"


def test_a_leading_space_stays_if_the_text_continues_another() -> None:
    tokenizer = tokenizer_of("fallback")
    ids = tokenizer.encode("mill")
    assert tokenizer.detokenizer().push(ids) == "mill"
    assert tokenizer.detokenizer(continues=True).push(ids) == " mill"
    spaces = tokenizer.detokenizer()
    assert "".join([spaces.push([token]) for token in tokenizer.encode("  x")]) == "  x"


def test_words_come_with_the_space_before_them() -> None:
    backend = word_piece()
    stream = tokenizer_of("words").detokenizer()
    names = ["the", "[CLS]", "mill", "##stream", "##s", ","]
    assert [stream.push([backend.token_to_id(name)]) for name in names] == ["the", "", " mill", "stream", "s", ","]


def scheme(decoder: decoders.Decoder) -> ByteScheme | None:
    return byte_scheme(decoder_config(decoder.__getstate__()))


def test_decoders_are_read_as_schemes() -> None:
    low_line = (("▁", " "),)
    assert scheme(decoders.ByteLevel()) == ByteScheme(byte_level=True)
    assert scheme(decoders.Metaspace()) == ByteScheme(replacements=low_line, strip=1)
    assert scheme(decoders.Metaspace(prepend_scheme="never")) == ByteScheme(replacements=low_line)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    assert scheme(decoders.Sequence(steps)) == ByteScheme(byte_fallback=True, replacements=low_line, strip=1)


def test_decoders_that_look_at_neighbours_have_no_scheme() -> None:
    assert byte_scheme(None) is None
    assert scheme(decoders.WordPiece()) is None
    assert scheme(decoders.BPEDecoder()) is None
    assert scheme(decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Fuse()])) is None
    assert scheme(decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)])) is None
