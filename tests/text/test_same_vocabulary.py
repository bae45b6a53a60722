"""Draft models must have the target's vocabulary, but for special tokens and what only one of them has."""

from __future__ import annotations

from tokenizers import Tokenizer as Backend
from tokenizers import models

from millstream.text.same_vocabulary import different_tokens
from millstream.text.tokenizer import Tokenizer


def tokenizer(*names: str, special: tuple[str, ...] = ()) -> Tokenizer:
    backend = Backend(models.BPE({name: number for number, name in enumerate(names)}, []))
    backend.add_special_tokens(list(special))
    return Tokenizer(backend)


def test_the_same_up_to_the_smaller_one() -> None:
    assert different_tokens(tokenizer("a", "b", "c"), tokenizer("a", "b", "c")) is None
    assert different_tokens(tokenizer("a", "b", "c", "d"), tokenizer("a", "b", "c")) is None
    assert different_tokens(tokenizer("a", "b"), tokenizer("a", "b", "c")) is None


def test_special_tokens_may_have_other_names() -> None:
    target, draft = tokenizer("a", "b", special=("<end>",)), tokenizer("a", "b", special=("<eos>",))
    assert different_tokens(target, draft) is None
    assert different_tokens(target, tokenizer("a", "b", "c")) is not None


def test_what_differs_is_named() -> None:
    found = different_tokens(tokenizer("a", "b", "c"), tokenizer("a", "c", "b"))
    assert found == "its vocabulary is another one: 1 is 'c', not 'b', 2 is 'b', not 'c'"
    found = different_tokens(tokenizer(*"abcdefgh"), tokenizer(*"habcdefg"))
    assert found is not None and found.endswith("and 5 others differ")
