"""Tokenizers built from a GGUF file's metadata."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from millstream.errors import ModelError
from millstream.models.gguf_file import GgufFile
from millstream.text.gguf_pretokenizers import EXPRESSIONS, WHOLE_WORDS
from millstream.text.gguf_tokenizer import GgufTokenizer, gguf_tokenizer
from support.tiers import examples

NORMAL, UNKNOWN, CONTROL, OWN, BYTE = 1, 2, 3, 4, 6
MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXT = "the cat sat on the mat, and the rat that sat there ate 12 345 oats; it's Größe 漢字 the end\n\n  of the tale"


def build(metadata: dict[str, Any]) -> GgufTokenizer:
    return gguf_tokenizer(
        GgufFile(Path("some.gguf"), {f"tokenizer.{key}": value for key, value in metadata.items()}, {})
    )


def trained(pre: str) -> tuple[Tokenizer, list[tuple[str, str]]]:
    """A byte-level tokenizer learned from `TEXT`, cut as `pre` says, and its merges."""
    tokenizer = Tokenizer(models.BPE())
    cuts = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in EXPRESSIONS[pre]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=MARKS, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    vocabulary = tokenizer.get_vocab()
    ranked = sorted(
        (token for token in vocabulary if token not in MARKS and len(token) > 1), key=vocabulary.__getitem__
    )
    merges = []
    for token in ranked:
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if (
                left in vocabulary
                and right in vocabulary
                and max(vocabulary[left], vocabulary[right]) < vocabulary[token]
            ):
                merges.append((left, right))
    return tokenizer, merges


def gpt2(pre: str = "gpt-2", **more: Any) -> tuple[GgufTokenizer, Tokenizer]:
    reference, merges = trained(pre if pre in EXPRESSIONS else "gpt-2")
    vocabulary = reference.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    reference.model = models.BPE(vocabulary, merges, ignore_merges=pre in WHOLE_WORDS)
    metadata: dict[str, Any] = {
        "ggml.model": "gpt2",
        "ggml.pre": pre,
        "ggml.tokens": tokens,
        "ggml.token_type": [CONTROL if token in MARKS else NORMAL for token in tokens],
        "ggml.merges": [f"{left} {right}" for left, right in merges],
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
    }
    return build(metadata | more), reference


@pytest.mark.parametrize(
    "pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "deepseek-llm", "gpt-4o", "tekken", "default"]
)
def test_byte_level_cuts_and_merges_as_its_family_does(pre: str) -> None:
    built, reference = gpt2(pre)
    for text in (TEXT, "", " ", "don't  DON'T\r\n\n 1234567 ½", "\u1f60b naïve"):
        found = built.tokenizer.encode(text, add_special_tokens=False).ids
        assert found == reference.encode(text, add_special_tokens=False).ids
        assert built.tokenizer.decode(found) == text
    assert built.notes == ()


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["abc", "1234", " 12", "\n"]),
        ("smollm", ["abc", "1", "2", "3", "4", " ", "1", "2", "\n"]),
        ("llama-bpe", ["abc", "123", "4", " ", "12", "\n"]),
        ("qwen2", ["abc", "1", "2", "3", "4", " ", "1", "2", "\n"]),
        ("deepseek-v3", ["abc", "123", "4", " ", "12", "\n"]),
        ("falcon", ["abc", "123", "4", " 12", "\n"]),
    ],
)
def test_how_digits_are_cut(pre: str, pieces: list[str]) -> None:
    words: list[str] = ["abc1234 12\n"]
    for expression in EXPRESSIONS[pre]:
        cut = pre_tokenizers.Split(Regex(expression), "isolated")
        words = [piece for word in words for piece, _ in cut.pre_tokenize_str(word)]
    assert words == pieces


@pytest.mark.parametrize("pre", sorted(EXPRESSIONS))
def test_every_expression_compiles_and_loses_nothing(pre: str) -> None:
    for expression in EXPRESSIONS[pre]:
        pieces = pre_tokenizers.Split(Regex(expression), "isolated").pre_tokenize_str(TEXT)
        assert "".join(piece for piece, _ in pieces) == TEXT


def test_control_tokens_are_one_id_each_and_can_be_left_out() -> None:
    tokenizer = gpt2()[0].tokenizer
    ids = tokenizer.encode("<|im_start|>the cat<|im_end|>", add_special_tokens=False).ids
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids) == "the cat"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>the cat<|im_end|>"


def test_what_the_file_says_around_the_vocabulary() -> None:
    built, _ = gpt2(chat_template="{{ messages }}", **{"ggml.add_eos_token": True})
    assert built.chat_template == "{{ messages }}"
    assert (built.bos_token, built.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert built.eos_ids == {0, 2}
    assert (built.add_bos, built.add_eos) == (False, True)
    assert gpt2("llama-bpe")[0].add_bos


def test_an_unknown_way_to_cut_is_noted() -> None:
    built, _ = gpt2("brand-new")
    assert len(built.notes) == 1
    assert "'brand-new'" in built.notes[0]
    assert built.tokenizer.decode(built.tokenizer.encode(TEXT).ids) == TEXT


PIECES = {
    "▁": -9.0,
    "a": -7.0,
    "b": -8.0,
    "c": -8.5,
    "ab": -1.0,
    "bc": -2.0,
    "abc": -3.0,
    "▁a": -1.5,
    "aa": -4.0,
    "▁ab": -5.0,
}
BYTES = [f"<0x{number:02X}>" for number in range(256)]
SPM_TOKENS = ["<unk>", "<s>", "</s>", *BYTES, *PIECES, "  ", "<mark>"]


def spm(**more: Any) -> GgufTokenizer:
    metadata: dict[str, Any] = {
        "ggml.model": "llama",
        "ggml.tokens": SPM_TOKENS,
        "ggml.scores": [PIECES.get(token, 0.0) for token in SPM_TOKENS],
        "ggml.token_type": [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(PIECES), OWN, CONTROL],
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0,
    }
    return build(metadata | more)


def best_first(text: str) -> list[str]:
    """SentencePiece's own rule, told plainly: join the neighbours whose union scores best, the leftmost first."""
    parts = list(text)
    while True:
        pairs = [
            (PIECES[left + right], -at) for at, (left, right) in enumerate(pairwise(parts)) if left + right in PIECES
        ]
        if not pairs:
            return parts
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


PLAIN, PREFIXED = spm(**{"ggml.add_space_prefix": False}), spm()


@settings(max_examples=examples(300), deadline=None)
@given(st.text("abc ", max_size=14).filter(lambda text: "  " not in text))
@example("abc abc aab")
def test_scores_merge_as_sentencepiece_does(text: str) -> None:
    wanted = best_first(text.replace(" ", "▁"))
    assert PLAIN.tokenizer.encode(text, add_special_tokens=False).tokens == wanted


@settings(max_examples=examples(100), deadline=None)
@given(st.text(st.characters(codec="utf-8", exclude_characters="▁"), max_size=20))
@example(" leading and  double ")
@example("漢字 and\nbytes 🙂")
def test_any_text_comes_back(text: str) -> None:
    # Where a space is put in front, it is put after every marked token too, and stays there. "  " is such a token.
    for built in (PLAIN,) if "  " in text else (PLAIN, PREFIXED):
        ids = built.tokenizer.encode(text, add_special_tokens=False).ids
        assert built.tokenizer.decode(ids, skip_special_tokens=False) == text


def test_a_character_without_a_token_is_spelled_in_bytes() -> None:
    assert PLAIN.tokenizer.encode("aé", add_special_tokens=False).tokens == ["a", "<0xC3>", "<0xA9>"]


def test_the_space_in_front_comes_and_goes() -> None:
    assert PREFIXED.tokenizer.encode("ab", add_special_tokens=False).tokens == ["▁ab"]
    assert PREFIXED.tokenizer.encode("<s>ab", add_special_tokens=False).tokens == ["<s>", "▁ab"]
    assert PREFIXED.add_bos


def test_tokens_of_the_user_are_found_first() -> None:
    assert PLAIN.tokenizer.encode("a  b<mark>", add_special_tokens=False).tokens == ["a", "  ", "b", "<mark>"]


def test_merges_in_the_file_are_used_where_it_has_them() -> None:
    merges = ["a b", "▁ ab", "b c", "not there"]
    built = spm(**{"ggml.model": "gemma4", "ggml.merges": merges})
    assert built.tokenizer.encode("abc abc\n", add_special_tokens=False).tokens == ["ab", "c", "▁ab", "c", "<0x0A>"]


def test_a_repeated_token_keeps_the_places_of_the_others() -> None:
    built = spm(**{"ggml.tokens": [*SPM_TOKENS[:-2], "ab", "<mark>"]})
    assert built.tokenizer.get_vocab_size() == len(SPM_TOKENS)
    assert built.tokenizer.token_to_id("<mark>") == len(SPM_TOKENS) - 1


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"ggml.model": "bert", "ggml.tokens": ["a"]}, "tokenizer 'bert' is not served"),
        ({"ggml.model": "gpt2"}, "no vocabulary"),
    ],
)
def test_what_is_not_served_is_said(metadata: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        build(metadata)
    assert "some.gguf" in caught.value.message
