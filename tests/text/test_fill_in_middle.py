"""Prompts with a suffix, for models with tokens for it."""

from __future__ import annotations

import pytest
from small_tokenizers import byte_level_json
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from millstream.errors import ContextOverflow
from millstream.text.fill_in_middle import detect_fill_in_middle
from millstream.text.tokenizer import Tokenizer

FAMILIES = {
    "qwen": (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), "{0}before{1}after{2}"),
    "starcoder": (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), "{0}before{1}after{2}"),
    "deepseek": (("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), "{0}before{1}after{2}"),
    "codellama": (("▁<PRE>", "▁<SUF>", "▁<MID>"), "{0}before{1}after{2}"),
    "codestral": (("[SUFFIX]", "[PREFIX]"), "{0}after{1}before"),
}


def tokenizer(*names: str) -> Tokenizer:
    backend = Backend.from_str(byte_level_json())
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return Tokenizer(backend, eos_token="<|end|>", eos_ids=[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parts_stand_after_their_tokens(family: str) -> None:
    names, form = FAMILIES[family]
    subject = tokenizer(*names)
    fim = detect_fill_in_middle(subject)
    assert fim is not None
    tokens = fim.encode(subject, None, "the mill ", " stream\n")
    text = b"".join(map(subject.token_bytes, tokens)).decode()
    assert text == "<|start|>" + form.format(*names).replace("before", "the mill ").replace("after", " stream\n")
    ids = {subject.token_id(name) for name in names}
    assert ids <= set(tokens) and ids <= fim.stop_tokens


@pytest.mark.parametrize("names", [(), ("<|fim_prefix|>", "<|fim_suffix|>"), ("[SUFFIX]",)])
def test_models_without_all_of_the_tokens(names: tuple[str, ...]) -> None:
    assert detect_fill_in_middle(tokenizer(*names)) is None


def test_clients_cannot_write_control_tokens_unless_allowed() -> None:
    names, _ = FAMILIES["qwen"]
    subject = tokenizer(*names)
    fim, control = detect_fill_in_middle(subject), subject.control_tokens([])
    assert fim is not None
    text = "a <|fim_middle|> b <|end|>"
    escaped = fim.encode(subject, control, text, text)
    middle, end = subject.token_id("<|fim_middle|>"), subject.token_id("<|end|>")
    assert (escaped.count(middle), escaped.count(end)) == (1, 0) and escaped[-1] == middle
    assert text.encode() in b"".join(map(subject.token_bytes, escaped)), "the text itself stays as it is"
    assert fim.encode(subject, None, text, text).count(middle) == 3


def test_parts_that_are_far_too_long_are_refused() -> None:
    subject = tokenizer(*FAMILIES["qwen"][0])
    fim = detect_fill_in_middle(subject)
    assert fim is not None
    with pytest.raises(ContextOverflow, match="This model's maximum context length is 100 tokens"):
        fim.encode(subject, None, "a", "ab " * 50_000, limit=100)
