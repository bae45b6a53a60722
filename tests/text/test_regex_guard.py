"""Regular expressions of untrusted tokenizers: those of real families pass, catastrophic backtracking is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_tokenizers import byte_level
from tokenizers import Regex, normalizers, pre_tokenizers

from millstream.errors import ModelError
from millstream.models.source import ModelSource
from millstream.text.gguf_pretokenizers import REGEXES
from millstream.text.loading import load_tokenizer
from millstream.text.regex_guard import check_regexes, may_backtrack_catastrophically


@pytest.mark.parametrize("family", REGEXES)
def test_regexes_of_real_families_pass(family: str) -> None:
    assert not any(may_backtrack_catastrophically(expression) for expression in REGEXES[family])


@pytest.mark.parametrize(
    "expression",
    [
        r"(a+)+$",
        r"(?:a*)*b",
        r"(a|a)+$",
        r"((a+)b?)*",
        r"(\w{1,9}){2,}",
        r"(?:[a-z]+\s?){50}x",
        r"(a)\1+",
        r"(a\g<0>?)",
    ],
)
def test_catastrophic_backtracking_is_found(expression: str) -> None:
    assert may_backtrack_catastrophically(expression)


@pytest.mark.parametrize(
    "expression",
    [r"(?i:'s|'t)?", r"[(a+)+]", r"\(a+\)+", r"[^\]+*]+", r"(abc)+", r"\p{L}+\p{N}{1,3}", r"(?:a|b)c+", r"\s+(?!\S)"],
)
def test_harmless_expressions_pass(expression: str) -> None:
    """An optional group is tried twice at most, and repetition signs in brackets are literal."""
    assert not may_backtrack_catastrophically(expression)


def test_a_tokenizer_with_a_catastrophic_expression_is_refused(tmp_path: Path) -> None:
    catastrophic = Regex(r"(a+)+$")
    splitting, replacing = byte_level(), byte_level()
    splitting.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(catastrophic, "isolated"), splitting.pre_tokenizer]
    )
    replacing.normalizer = normalizers.Replace(catastrophic, "")
    for tokenizer in (splitting, replacing):
        with pytest.raises(ModelError, match="would never end"):
            check_regexes(tokenizer)
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(ModelError, match="would never end"):
            load_tokenizer(ModelSource("catastrophic", "folder", tmp_path))
    check_regexes(byte_level())
