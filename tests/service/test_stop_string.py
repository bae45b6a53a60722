"""The last delta of a choice names the stop string that ended it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.engine.generation.messages import Generate
from millstream.service.generation.choice import Choice
from millstream.service.generation.output_parsing import OutputParsing
from millstream.text.loading import load_tokenizer
from millstream.text.tokenizer import Tokenizer
from millstream.types import Delta, FinishReason
from support.tiny import byte_source


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Tokenizer]:
    with tempfile.TemporaryDirectory() as folder:
        yield load_tokenizer(byte_source(Path(folder)))


def deltas(tokenizer: Tokenizer, text: str, reason: FinishReason, min_tokens: int = 0) -> list[Delta]:
    submit = Generate(1, (0,), 500, min_tokens=min_tokens)
    choice = Choice(0, submit, tokenizer, OutputParsing(stop=("END", "ENDING", "!?")), continues=False)
    tokens = tokenizer.encode(text)
    emitted = [delta for token in tokens for delta in choice.push((token,), ())]
    return emitted + choice.finish(reason, len(tokens))


@pytest.mark.parametrize(
    ("text", "content", "stop_string"),
    [
        ("up to here END and more", "up to here ", "END"),
        ("really!? END", "really", "!?"),
        ("no such string", "no such string", None),
        ("the last one is cut: EN", "the last one is cut: EN", None),
    ],
)
def test_the_last_delta_names_the_stop_string(
    tokenizer: Tokenizer, text: str, content: str, stop_string: str | None
) -> None:
    *before, last = deltas(tokenizer, text, FinishReason.LENGTH)
    assert "".join(delta.text for delta in [*before, last]) == content
    assert last.stop_string == stop_string
    assert last.finish_reason is (FinishReason.LENGTH if stop_string is None else FinishReason.STOP)
    assert all(delta.stop_string is None and delta.finish_reason is None for delta in before)


def test_an_end_of_sequence_token_sets_no_stop_string(tokenizer: Tokenizer) -> None:
    assert deltas(tokenizer, "done", FinishReason.STOP)[-1].stop_string is None


@pytest.mark.parametrize(
    ("min_tokens", "content"),
    [(0, ""), (1, "END one "), (3, "END one "), (8, "END one "), (9, "END one END two"), (99, "END one END two")],
)
def test_stop_strings_count_after_the_minimum(tokenizer: Tokenizer, min_tokens: int, content: str) -> None:
    """Each byte is a token here. What comes before the minimum is no part of a match, for it has been sent."""
    found = deltas(tokenizer, "END one END two", FinishReason.LENGTH, min_tokens)
    assert "".join(delta.text for delta in found) == content
