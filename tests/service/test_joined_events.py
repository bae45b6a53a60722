"""Queued events of a request are merged into one, which makes no difference to clients."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.engine.generation.messages import Generate, Generated, PromptLogprobs, Tokens
from millstream.engine.messages import Failed, RequestEvent
from millstream.service.generation.choice import Choice
from millstream.service.generation.merge_tokens import merge_tokens
from millstream.service.generation.output_parsing import OutputParsing
from millstream.text.chat_format import REASONING, ChatFormat
from millstream.text.loading import load_tokenizer
from millstream.text.tokenizer import Tokenizer
from millstream.text.tool_formats import hermes
from millstream.types import Delta, FinishReason, TokenLogprob, Usage
from support.tiny import byte_source

CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
OUTPUTS = {
    "plain": (OutputParsing(), "some text, and some more"),
    "stop": (OutputParsing(stop=("STOP",)), "up to here STOP and no further"),
    "reasoning": (
        OutputParsing(chat_format=ChatFormat(reasoning=REASONING["think"])),
        "<think>it is late</think>good night",
    ),
    "budget": (
        OutputParsing(chat_format=ChatFormat(reasoning=REASONING["think"]), reasoning_budget=4),
        "<think>it is late</think>good night",
    ),
    "one call": (
        OutputParsing(chat_format=ChatFormat(tools=hermes.FORMAT), schemas={"f": {}}, single=True),
        CALL + " and more",
    ),
    "calls": (OutputParsing(chat_format=ChatFormat(tools=hermes.FORMAT), schemas={"f": {}}), f"well {CALL}{CALL} done"),
}
ENDS: dict[str, FinishReason | None] = {"stop": FinishReason.STOP, "one call": FinishReason.TOOL_CALLS}


@functools.cache
def tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return load_tokenizer(byte_source(Path(folder)))


def read(name: str, events: list[RequestEvent]) -> tuple[object, ...]:
    parsing, _ = OUTPUTS[name]
    choice = Choice(0, Generate(1, (0,), 500), tokenizer(), parsing, continues=False)
    deltas: list[Delta] = []
    for event in events:
        assert isinstance(event, Tokens)
        deltas += choice.push(event.tokens, event.logprobs)
    return (
        "".join(delta.text for delta in deltas),
        "".join(delta.reasoning for delta in deltas),
        [logprob.logprob for delta in deltas for logprob in delta.logprobs],
        "".join(call.name + call.arguments for delta in deltas for call in delta.calls),
        choice.completion_tokens,
        choice.reasoning_tokens,
        choice.finish_reason,
    )


@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("name", OUTPUTS)
@given(cuts=st.lists(st.integers(1, 12), max_size=20))
def test_an_answer_does_not_depend_on_how_its_tokens_are_merged(name: str, scored: bool, cuts: list[int]) -> None:
    tokens = tokenizer().encode(OUTPUTS[name][1])
    single: list[RequestEvent] = [
        Tokens(1, (token,), (TokenLogprob(token, -position / 8),) if scored else ())
        for position, token in enumerate(tokens)
    ]
    batches, start = [], 0
    for cut in [*cuts, len(tokens)]:
        batches.append(single[start : start + cut])
        start += cut
    expected = read(name, single)
    assert read(name, [event for batch in batches if batch for event in merge_tokens(batch)]) == expected
    assert expected[-1] == ENDS.get(name)


def test_tokens_of_several_requests_are_not_mixed() -> None:
    end = Generated(1, FinishReason.LENGTH, Usage(1, 2, 0))
    events: list[RequestEvent] = [
        PromptLogprobs(1, ()),
        Tokens(1, (5,)),
        Tokens(2, (6,)),
        Tokens(1, (7, 8)),
        end,
        Tokens(2, (9,)),
        Failed(2, "broken"),
    ]
    assert merge_tokens(events) == [
        PromptLogprobs(1, ()),
        Tokens(1, (5, 7, 8)),
        Tokens(2, (6, 9)),
        end,
        Failed(2, "broken"),
    ]
