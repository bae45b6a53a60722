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


def deltas(tokenizer: Tokenizer, text: str, reason: FinishReason) -> list[Delta]:
    choice = Choice(0, Generate(1, (0,), 500), tokenizer, OutputParsing(stop=("END", "ENDING", "!?")), continues=False)
    tokens = tokenizer.encode(text)
    found = [choice.push((token,), ()) for token in tokens]
    found.append(choice.finish(reason, len(tokens)))
    return [delta for delta in found if delta is not None]


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


def test_the_end_of_text_token_names_none(tokenizer: Tokenizer) -> None:
    assert deltas(tokenizer, "done", FinishReason.STOP)[-1].stop_string is None
