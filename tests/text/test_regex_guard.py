"""Regular expressions in a stranger's tokenizer: those of real families pass, those that can run for ever do not."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_tokenizers import byte_level
from tokenizers import Regex, normalizers, pre_tokenizers

from millstream.errors import ModelError
from millstream.models.source import ModelSource
from millstream.text.gguf_pretokenizers import EXPRESSIONS
from millstream.text.loading import load_tokenizer
from millstream.text.regex_guard import check_expressions, runs_wild


@pytest.mark.parametrize("family", EXPRESSIONS)
def test_families_pass(family: str) -> None:
    assert not any(runs_wild(expression) for expression in EXPRESSIONS[family])


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
def test_what_can_run_for_ever_is_found(expression: str) -> None:
    assert runs_wild(expression)


@pytest.mark.parametrize(
    "expression",
    [r"(?i:'s|'t)?", r"[(a+)+]", r"\(a+\)+", r"[^\]+*]+", r"(abc)+", r"\p{L}+\p{N}{1,3}", r"(?:a|b)c+", r"\s+(?!\S)"],
)
def test_what_cannot_passes(expression: str) -> None:
    """An optional group is tried twice at most, and what stands in brackets means itself."""
    assert not runs_wild(expression)


def test_a_tokenizer_with_such_an_expression_is_refused(tmp_path: Path) -> None:
    wild = Regex(r"(a+)+$")
    cutting, replacing = byte_level(), byte_level()
    cutting.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(wild, "isolated"), cutting.pre_tokenizer])
    replacing.normalizer = normalizers.Replace(wild, "")
    for tokenizer in (cutting, replacing):
        with pytest.raises(ModelError, match="would never end"):
            check_expressions(tokenizer)
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(ModelError, match="would never end"):
            load_tokenizer(ModelSource("wild", "folder", tmp_path))
    check_expressions(byte_level())
