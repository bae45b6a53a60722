"""Where the tokens of an echoed prompt begin in its text: evaluation harnesses split there."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import processors

from millstream.service.generation.prompt_echo import PromptEcho
from millstream.text.tokenizer import Tokenizer
from millstream.types import Delta, GenerationRequest, TextPrompt, TokenLogprob
from support.tiny import write_tokenizer

START = "<|im_start|>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token per byte. It adds a token at the start, as many do."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single=f"{START} $A", special_tokens=[(START, backend.token_to_id(START))]
    )
    return Tokenizer(backend)


def offsets(tokenizer: Tokenizer, text: str, *, special: bool) -> list[int]:
    """Of all tokens; the prompt comes in two chunks."""
    tokens = tuple(tokenizer.encode(text, special=special))
    request = GenerationRequest("m", (TextPrompt(text),), echo=True, logprobs=0)
    echo = PromptEcho(request, text, tokens, tokenizer)
    for chunk in (tokens[1:3], tokens[3:]):
        echo.add([TokenLogprob(token, -1.0) for token in chunk])
    return [each.offset for each in echo.prepend_to(Delta(0)).logprobs]


def test_parts_of_a_character_begin_where_it_does(tokenizer: Tokenizer) -> None:
    assert offsets(tokenizer, "aé日b", special=False) == [0, 1, 1, 2, 2, 2, 3]


def test_a_token_that_the_tokenizer_adds_takes_no_room(tokenizer: Tokenizer) -> None:
    assert offsets(tokenizer, "the", special=True) == [0, 0, 1, 2]


def test_a_special_token_that_was_written_takes_its_name(tokenizer: Tokenizer) -> None:
    assert offsets(tokenizer, f"a{START}b", special=False) == [0, 1, 1 + len(START)]
    assert offsets(tokenizer, f"{START}b", special=True)[2] == len(START)
