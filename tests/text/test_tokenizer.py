"""The tokenizer: exact bytes, EOS tokens, special tokens and conversations."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import SENTENCES, byte_fallback, byte_level, word_piece

from millstream.errors import BadRequest
from millstream.text.tokenizer import Tokenizer
from support.templates import encode_chat, render_chat

CHAT = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
USER = [{"role": "user", "content": "the mill"}]


def test_special_tokens_are_added_on_demand() -> None:
    tokenizer = Tokenizer(byte_level())
    plain = tokenizer.encode("the mill", special=False)
    assert tokenizer.encode("the mill") == [0, *plain]
    assert tokenizer.decode([0, *plain, 1]) == "the mill"


@pytest.mark.parametrize("text", [*SENTENCES, "", " ", "  two  ", "\x00\x7f", "日本🇯🇵"])
@pytest.mark.parametrize("make", [byte_level, byte_fallback, lambda: byte_fallback(strip=False)])
def test_text_round_trips(make, text: str) -> None:  # type: ignore[no-untyped-def]
    tokenizer = Tokenizer(make())
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.text(max_size=40))
def test_bytes_of_tokens_join_to_the_text(text: str) -> None:
    tokenizer = Tokenizer(byte_level())
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text, special=False))) == text.encode()


def test_bytes_of_one_token() -> None:
    level, fallback, pieces = byte_level(), byte_fallback(), word_piece()
    low_line = next(i for name, i in fallback.get_vocab().items() if name.startswith("▁") and len(name) > 1)
    assert Tokenizer(level).token_bytes(level.token_to_id("Ġ")) == b" "
    assert Tokenizer(level).token_bytes(level.token_to_id("<|end|>")) == b"<|end|>"
    assert Tokenizer(level).token_bytes(level.token_to_id("<think>")) == b"<think>"
    assert Tokenizer(fallback).token_bytes(fallback.token_to_id("<0xF0>")) == b"\xf0"
    assert Tokenizer(fallback).token_bytes(low_line).startswith(b" ")
    assert Tokenizer(fallback).token_bytes(1) == b"<s>"
    assert Tokenizer(pieces).token_bytes(pieces.token_to_id("water")) == b"water"
    assert Tokenizer(level).token_bytes(10**6) == b""


def test_a_saved_truncation_or_padding_does_not_apply() -> None:
    backend = byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=500)
    tokenizer = Tokenizer(backend)
    assert tokenizer.decode(tokenizer.encode(SENTENCES[0])) == SENTENCES[0]


def test_properties() -> None:
    tokenizer = Tokenizer(byte_level(), eos_ids=[1, 1], notes=["one"])
    assert tokenizer.eos_ids == frozenset({1})
    assert tokenizer.vocab_size == byte_level().get_vocab_size()
    assert tokenizer.notes == ("one",)
    assert tokenizer.template is None


@pytest.mark.parametrize("make", [byte_level, byte_fallback, word_piece])
def test_special_tokens_can_be_shown(make) -> None:  # type: ignore[no-untyped-def]
    """Some models mark reasoning and calls with special tokens: the output parser needs those, and no others."""
    backend = make()
    backend.add_special_tokens(["<|call|>", "<|skip|>"])
    tokenizer = Tokenizer(backend)
    shown = tokenizer.special_tokens_in(("a <|call|> b", "<think>"))
    assert shown == {tokenizer.token_id("<|call|>")}
    ids = tokenizer.encode("the<|call|>the<|skip|>", special=False)
    assert tokenizer.decode(ids).replace(" ", "") == "thethe"
    stream = tokenizer.detokenizer(shown=shown)
    text = "".join(stream.push([token]) for token in ids) + stream.finish()
    assert text.replace(" ", "") == "the<|call|>the"


def test_an_unpaired_surrogate_is_a_bad_request() -> None:
    with pytest.raises(BadRequest, match="Unicode"):
        Tokenizer(byte_level()).encode("a\ud800b")


def test_a_conversation_gets_its_special_tokens_from_the_template_alone() -> None:
    tokenizer = Tokenizer(byte_level(), chat_template=CHAT, bos_token="<|start|>", eos_token="<|end|>")
    plain = tokenizer.encode("the mill", special=False)
    assert render_chat(tokenizer, USER) == "<|start|>the mill<|end|>"
    assert encode_chat(tokenizer, USER) == [0, *plain, 1]
    bare = Tokenizer(byte_level(), chat_template="{{ messages[0].content }}", bos_token="<|start|>")
    assert encode_chat(bare, USER) == plain


def test_other_special_tokens_are_known_to_the_template() -> None:
    tokenizer = Tokenizer(byte_level(), chat_template="{{ pad_token }}{{ x }}", special_tokens={"pad_token": "<|end|>"})
    assert render_chat(tokenizer, USER, x=1) == "<|end|>1"


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    tokenizer = Tokenizer(byte_level())
    text = SENTENCES[0] * 20_000
    ticks: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    begin = time.perf_counter()
    tokenizer.encode(text)
    end = time.perf_counter()
    done.set()
    thread.join()
    during = sum(begin < at < end for at in ticks)
    assert during > 3
