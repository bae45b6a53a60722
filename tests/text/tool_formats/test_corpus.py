"""Each format over its corpus: the same parts however the text is cut, invalid calls as content, nothing lost."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from corpus import json_formats, other_formats
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_examples import SCHEMAS, Example

from millstream.text.chat_format import REASONING, ChatFormat
from millstream.text.output.parser import Message, OutputParser
from millstream.text.output.parts import Part, PartKind
from millstream.text.tool_formats.registry import FORMATS
from support.tiers import examples

CORPUS: dict[str, Sequence[Example]] = {
    "hermes": json_formats.HERMES,
    "qwen3-coder": other_formats.QWEN3_CODER,
    "llama": json_formats.LLAMA,
    "pythonic": other_formats.PYTHONIC,
    "lfm2": other_formats.PYTHONIC,
    "mistral": json_formats.MISTRAL,
    "mistral-json": json_formats.MISTRAL_JSON,
    "gemma": other_formats.GEMMA,
    "functiongemma": other_formats.FUNCTION_GEMMA,
    "glm": other_formats.GLM,
    "kimi": json_formats.KIMI,
    "minimax": other_formats.MINIMAX,
    "deepseek-v3": json_formats.DEEPSEEK_V3,
    "deepseek-v3.1": json_formats.DEEPSEEK_V31,
    "deepseek-v3.2": other_formats.DEEPSEEK_V32,
    "harmony": json_formats.HARMONY,
    "granite": json_formats.GRANITE,
    "nemotron": json_formats.NEMOTRON,
}
CASES = [(name, index) for name, examples in CORPUS.items() for index in range(len(examples))]


def chat_format(name: str) -> ChatFormat:
    form = FORMATS[name]
    return ChatFormat(form, form.reasoning or REASONING["think"])


def parse(
    name: str, pieces: Sequence[str], in_reasoning: bool = False, cut: bool = False
) -> tuple[Message, list[Part]]:
    output = OutputParser(chat_format(name), SCHEMAS, in_reasoning=in_reasoning, unmarked=True)
    parts = [part for piece in pieces for part in output.push(piece)] + output.finish(cut=cut)
    message = Message()
    message.add(parts)
    return message, parts


def joined_sources(parts: Sequence[Part]) -> str:
    """Returns the sources of all parts, except those of void calls."""
    counted: list[Part] = []
    for part in parts:
        if part.kind is PartKind.VOID:
            while counted.pop().kind is not PartKind.CALL:
                pass
        else:
            counted.append(part)
    return "".join(part.source for part in counted)


def test_every_format_has_a_corpus() -> None:
    assert CORPUS.keys() == FORMATS.keys()
    assert all(len(examples) >= 15 for examples in CORPUS.values())
    assert all(len({example.text for example in examples}) == len(examples) for examples in CORPUS.values())


@pytest.mark.parametrize(("name", "index"), CASES)
def test_an_example_cut_anywhere(name: str, index: int) -> None:
    example = CORPUS[name][index]
    text = example.text
    whole, parts = parse(name, [text], example.in_reasoning)
    assert [(call, json.loads(arguments)) for call, arguments in whole.calls] == list(example.calls)
    assert (whole.content, whole.reasoning) == (example.content, example.reasoning)
    assert joined_sources(parts) == text
    by_character, parts = parse(name, list(text), example.in_reasoning)
    assert by_character == whole
    assert joined_sources(parts) == text
    for cut in range(1, len(text)):
        assert parse(name, [text[:cut], text[cut:]], example.in_reasoning)[0] == whole, (text[:cut], text[cut:])


@pytest.mark.parametrize(("name", "index"), CASES)
def test_an_example_that_ends_too_early_loses_nothing(name: str, index: int) -> None:
    example = CORPUS[name][index]
    for end in range(len(example.text)):
        text = example.text[:end]
        message, parts = parse(name, [text], example.in_reasoning)
        assert joined_sources(parts) == text
        for _, arguments in message.calls:
            assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize(("name", "index"), [case for case in CASES if CORPUS[case[0]][case[1]].calls])
def test_a_call_that_is_cut_off_leaves_no_markup_in_the_content(name: str, index: int, whole: bool) -> None:
    """A limit has ended the output. Up to four characters may be text or a marker: they stay."""
    example = CORPUS[name][index]
    uncut, _ = parse(name, [example.text], example.in_reasoning)
    for end in range(0, len(example.text), 1 if whole else 3):
        text = example.text[:end]
        message, parts = parse(name, [text], example.in_reasoning, cut=True)
        assert joined_sources(parts) == text
        assert example.content.startswith(message.content[:-4].rstrip()), (text, message.content)
        assert all(part.kind is not PartKind.VOID for part in parts)
        for (called, arguments), (expected, complete) in zip(message.calls, uncut.calls, strict=False):
            assert called == expected and complete.startswith(arguments), "what was sent of a call stays"
        if end % 8 == 0:
            assert parse(name, list(text), example.in_reasoning, cut=True)[0] == message


@pytest.mark.parametrize("name", CORPUS)
@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_random_chunks_of_random_examples(name: str, data: st.DataObject) -> None:
    """Several examples in a row, too: the state after the first must not depend on the cuts either."""
    chosen = data.draw(st.lists(st.sampled_from(CORPUS[name]), min_size=1, max_size=3))
    text = data.draw(st.sampled_from(["", "\n", " and "])).join(example.text for example in chosen)
    text = text[: data.draw(st.integers(0, len(text)))] if data.draw(st.booleans()) else text
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    cut = data.draw(st.booleans())
    whole, parts = parse(name, [text], chosen[0].in_reasoning, cut)
    assert joined_sources(parts) == text
    message, parts = parse(name, pieces, chosen[0].in_reasoning, cut)
    assert message == whole
    assert joined_sources(parts) == text


@pytest.mark.parametrize("name", CORPUS)
@settings(max_examples=examples(80), deadline=None)
@given(data=st.data())
def test_noise_made_of_a_formats_own_markers(name: str, data: st.DataObject) -> None:
    """Never an exception, never a lost character, never another result for another cut."""
    pieces = [*chat_format(name).markers, *"{}\"':,[] x", "name", "arguments", "get_weather"]
    text = "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=24)))
    cut = data.draw(st.booleans())
    whole, parts = parse(name, [text], cut=cut)
    assert joined_sources(parts) == text
    by_character, parts = parse(name, list(text), cut=cut)
    assert by_character == whole
    assert joined_sources(parts) == text
