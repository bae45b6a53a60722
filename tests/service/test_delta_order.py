"""Deltas come in the order in which the model wrote their parts, however many tokens arrive at once."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.api.openai.render_chat import ChatRenderer
from millstream.engine.generation.messages import Generate
from millstream.service.generation.choice import Choice
from millstream.service.generation.output_parsing import OutputParsing
from millstream.text.chat_format import REASONING, ChatFormat
from millstream.text.loading import load_tokenizer
from millstream.text.tokenizer import Tokenizer
from millstream.text.tool_formats import hermes
from millstream.types import Delta, FinishReason, TokenLogprob
from support.tiny import byte_source

CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
CUT = '<tool_call>{"name": "f", "arguments": {"x": 1'
INVALID = CUT + " oops}}</tool_call>"
D = ("text", "d")
DONE = ("call", 'f{"x": 1}')
OUTPUTS: list[tuple[str, list[tuple[str, str]]]] = [
    (f"<think>a</think>b{CALL}c{CALL}{CALL}d", [("reasoning", "a"), ("text", "b"), DONE, ("text", "c"), DONE, DONE, D]),
    (f"b{CALL}<think>e</think>c", [("text", "b"), DONE, ("reasoning", "e"), ("text", "c")]),
    (f"{INVALID}b{CALL}", [("call", 'f{"x": 1 '), ("void", ""), ("text", f"{INVALID}b"), DONE]),
    (f"b{CALL} c{CUT}", [("text", "b"), DONE, ("text", "c"), ("call", 'f{"x": 1')]),
]


@functools.cache
def tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return load_tokenizer(byte_source(Path(folder)))


def run(text: str, sizes: Sequence[int], scored: bool = False) -> list[Delta]:
    """Returns all deltas of an output that a limit ended, if its tokens arrive `sizes` at a time."""
    parsing = OutputParsing(chat_format=ChatFormat(hermes.FORMAT, REASONING["think"]), schemas={"f": {}})
    choice = Choice(0, Generate(1, (0,), 500), tokenizer(), parsing, continues=False)
    tokens = tokenizer().encode(text)
    deltas: list[Delta] = []
    start = 0
    for size in [*sizes, len(tokens)]:
        piece = tokens[start : start + size]
        deltas += choice.push(piece, [TokenLogprob(token, -0.5) for token in piece] if scored else [])
        start += size
    return deltas + choice.finish(FinishReason.LENGTH, len(tokens))


def sequence(deltas: Iterable[Delta]) -> list[tuple[str, str]]:
    """Returns the parts of the deltas as a client sees them that reads each delta in its order."""
    found: list[tuple[str, str]] = []
    for delta in deltas:
        parts = [("reasoning", delta.reasoning), ("text", delta.text)]
        parts += [("void" if call.void else "call", call.name + call.arguments) for call in delta.calls]
        for kind, text in parts:
            if found and found[-1][0] == kind and not (kind == "call" and text == "f"):
                found[-1] = (kind, found[-1][1] + text)
            elif text or kind == "void":
                found.append((kind, text))
    return found


@pytest.mark.parametrize(("text", "expected"), OUTPUTS)
@given(sizes=st.lists(st.integers(1, 40), max_size=20))
def test_parts_keep_their_order(text: str, expected: list[tuple[str, str]], sizes: list[int]) -> None:
    deltas = run(text, sizes)
    assert sequence(deltas) == expected
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + [FinishReason.LENGTH]


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(("text", "expected"), OUTPUTS)
def test_a_stream_shows_parts_in_their_order(text: str, expected: list[tuple[str, str]], size: int) -> None:
    """Also if the deltas of many tokens wait for the client, and are sent as one batch."""
    raw = ChatRenderer("m", include_usage=False, logprobs=False).chunks(run(text, [size] * (len(text) // size)))
    seen: list[tuple[str, str]] = []
    for line in raw.split(b"\n\n")[:-1]:
        choice = json.loads(line.removeprefix(b"data: "))["choices"][0]
        for key, value in choice["delta"].items():
            if key == "content" and value:
                seen.append(("text", value))
            elif key == "reasoning_content":
                seen.append(("reasoning", value))
            elif key == "tool_calls":
                name = value[0]["function"].get("name", "")
                if not name and seen[-1][0] == "call":
                    seen[-1] = ("call", seen[-1][1] + value[0]["function"]["arguments"])
                else:
                    seen.append(("call", name + value[0]["function"]["arguments"]))
    assert seen == [part for part in expected if part[0] != "void"]


@pytest.mark.parametrize(("text", "expected"), OUTPUTS[:2])
def test_log_probabilities_stay_with_their_text(text: str, expected: list[tuple[str, str]]) -> None:
    deltas = run(text, [1000], scored=True)
    assert "".join(token.text for delta in deltas for token in delta.logprobs) == text
    assert len(deltas) > 2
    for delta in deltas:
        tokens = "".join(token.text for token in delta.logprobs)
        assert delta.text in tokens and delta.reasoning in tokens
        assert tokens.count("<tool_call>") == sum(bool(call.id) for call in delta.calls)
