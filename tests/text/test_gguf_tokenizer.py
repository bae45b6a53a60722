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
from millstream.text.gguf_pretokenizers import IGNORE_MERGES, REGEXES
from millstream.text.gguf_tokenizer import GgufTokenizer, gguf_tokenizer
from support.tiers import examples

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXT = "the cat sat on the mat, and the rat that sat there ate 12 345 oats; it's Größe 漢字 the end\n\n  of the tale"


def build(metadata: dict[str, Any]) -> GgufTokenizer:
    return gguf_tokenizer(
        GgufFile(Path("some.gguf"), {f"tokenizer.{key}": value for key, value in metadata.items()}, {})
    )


def trained(pre: str) -> tuple[Tokenizer, list[tuple[str, str]]]:
    """Returns a byte-level tokenizer trained on `TEXT` with the pre-tokenizer `pre`, and its merges."""
    tokenizer = Tokenizer(models.BPE())
    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in REGEXES[pre]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    vocabulary = tokenizer.get_vocab()
    ranked = sorted(
        (token for token in vocabulary if token not in SPECIAL_TOKENS and len(token) > 1), key=vocabulary.__getitem__
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
    reference, merges = trained(pre if pre in REGEXES else "gpt-2")
    vocabulary = reference.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    reference.model = models.BPE(vocabulary, merges, ignore_merges=pre in IGNORE_MERGES)
    metadata: dict[str, Any] = {
        "ggml.model": "gpt2",
        "ggml.pre": pre,
        "ggml.tokens": tokens,
        "ggml.token_type": [CONTROL if token in SPECIAL_TOKENS else NORMAL for token in tokens],
        "ggml.merges": [f"{left} {right}" for left, right in merges],
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
    }
    return build(metadata | more), reference


@pytest.mark.parametrize(
    "pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "deepseek-llm", "gpt-4o", "tekken", "default"]
)
def test_byte_level_splits_and_merges_as_its_family_does(pre: str) -> None:
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
def test_how_digits_are_split(pre: str, pieces: list[str]) -> None:
    words: list[str] = ["abc1234 12\n"]
    for expression in REGEXES[pre]:
        split = pre_tokenizers.Split(Regex(expression), "isolated")
        words = [piece for word in words for piece, _ in split.pre_tokenize_str(word)]
    assert words == pieces


@pytest.mark.parametrize("pre", sorted(REGEXES))
def test_every_expression_compiles_and_loses_nothing(pre: str) -> None:
    for expression in REGEXES[pre]:
        pieces = pre_tokenizers.Split(Regex(expression), "isolated").pre_tokenize_str(TEXT)
        assert "".join(piece for piece, _ in pieces) == TEXT


def test_control_tokens_are_one_id_each_and_can_be_skipped() -> None:
    tokenizer = gpt2()[0].tokenizer
    ids = tokenizer.encode("<|im_start|>the cat<|im_end|>", add_special_tokens=False).ids
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids) == "the cat"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>the cat<|im_end|>"


def test_template_special_tokens_and_flags_of_the_file() -> None:
    built, _ = gpt2(chat_template="{{ messages }}", **{"ggml.add_eos_token": True})
    assert built.chat_template == "{{ messages }}"
    assert (built.bos_token, built.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert built.eos_ids == {0, 2}
    assert (built.add_bos, built.add_eos) == (False, True)
    assert gpt2("llama-bpe")[0].add_bos


def test_an_unknown_pre_tokenizer_is_noted() -> None:
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
        "ggml.token_type": [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(PIECES), USER_DEFINED, CONTROL],
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0,
    }
    return build(metadata | more)


def best_first(text: str) -> list[str]:
    """SentencePiece's rule: repeatedly join the neighbours whose union has the best score, the leftmost first."""
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
def test_any_text_round_trips(text: str) -> None:
    # With a space prefix, every added token is followed by a space that stays. "  " is an added token.
    for built in (PLAIN,) if "  " in text else (PLAIN, PREFIXED):
        ids = built.tokenizer.encode(text, add_special_tokens=False).ids
        assert built.tokenizer.decode(ids, skip_special_tokens=False) == text


def test_a_character_without_a_token_falls_back_to_bytes() -> None:
    assert PLAIN.tokenizer.encode("aé", add_special_tokens=False).tokens == ["a", "<0xC3>", "<0xA9>"]


def test_the_space_prefix() -> None:
    assert PREFIXED.tokenizer.encode("ab", add_special_tokens=False).tokens == ["▁ab"]
    assert PREFIXED.tokenizer.encode("<s>ab", add_special_tokens=False).tokens == ["<s>", "▁ab"]
    assert PREFIXED.add_bos


def test_user_defined_tokens_are_matched_first() -> None:
    assert PLAIN.tokenizer.encode("a  b<mark>", add_special_tokens=False).tokens == ["a", "  ", "b", "<mark>"]


def test_merges_in_the_file_are_used() -> None:
    merges = ["a b", "▁ ab", "b c", "not there"]
    built = spm(**{"ggml.model": "gemma4", "ggml.merges": merges})
    assert built.tokenizer.encode("abc abc\n", add_special_tokens=False).tokens == ["ab", "c", "▁ab", "c", "<0x0A>"]


def test_a_repeated_token_does_not_change_other_ids() -> None:
    built = spm(**{"ggml.tokens": [*SPM_TOKENS[:-2], "ab", "<mark>"]})
    assert built.tokenizer.get_vocab_size() == len(SPM_TOKENS)
    assert built.tokenizer.token_to_id("<mark>") == len(SPM_TOKENS) - 1


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"ggml.model": "bert", "ggml.tokens": ["a"]}, "tokenizer type 'bert' is not supported"),
        ({"ggml.model": "gpt2"}, "no vocabulary"),
    ],
)
def test_unsupported_tokenizers_raise(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        build(metadata)
    assert "some.gguf" in caught.value.message
