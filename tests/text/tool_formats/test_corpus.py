"""Each format over its corpus: the same parts however the text is cut, broken calls as text, and nothing lost."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from corpus import json_formats, other_formats
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_examples import SCHEMAS, Example

from millstream.text.output import Message, Output
from millstream.text.parts import Kind, Part
from millstream.text.style import REASONING, Style
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
CASES = [(name, place) for name, examples in CORPUS.items() for place in range(len(examples))]


def style(name: str) -> Style:
    form = FORMATS[name]
    return Style(form, form.reasoning or REASONING["think"])


def read(name: str, pieces: Sequence[str], thinking: bool = False) -> tuple[Message, list[Part]]:
    output = Output(style(name), SCHEMAS, thinking=thinking)
    parts = [part for piece in pieces for part in output.push(piece)] + output.finish()
    message = Message()
    message.add(parts)
    return message, parts


def accounted(parts: Sequence[Part]) -> str:
    """The sources of all parts, less those of calls that came to nothing."""
    kept: list[Part] = []
    for part in parts:
        if part.kind is Kind.VOID:
            while kept.pop().kind is not Kind.CALL:
                pass
        else:
            kept.append(part)
    return "".join(part.source for part in kept)


def test_every_format_has_a_corpus() -> None:
    assert CORPUS.keys() == FORMATS.keys()
    assert all(len(examples) >= 15 for examples in CORPUS.values())
    assert all(len({example.text for example in examples}) == len(examples) for examples in CORPUS.values())


@pytest.mark.parametrize(("name", "place"), CASES)
def test_an_example_cut_anywhere(name: str, place: int) -> None:
    example = CORPUS[name][place]
    text = example.text
    whole, parts = read(name, [text], example.thinking)
    assert [(call, json.loads(arguments)) for call, arguments in whole.calls] == list(example.calls)
    assert (whole.content, whole.reasoning) == (example.content, example.reasoning)
    assert accounted(parts) == text
    letters, parts = read(name, list(text), example.thinking)
    assert letters == whole
    assert accounted(parts) == text
    for cut in range(1, len(text)):
        assert read(name, [text[:cut], text[cut:]], example.thinking)[0] == whole, (text[:cut], text[cut:])


@pytest.mark.parametrize(("name", "place"), CASES)
def test_an_example_that_ends_too_early_loses_nothing(name: str, place: int) -> None:
    example = CORPUS[name][place]
    for end in range(len(example.text)):
        text = example.text[:end]
        message, parts = read(name, [text], example.thinking)
        assert accounted(parts) == text
        for _, arguments in message.calls:
            assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("name", CORPUS)
@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_random_chunks_of_random_examples(name: str, data: st.DataObject) -> None:
    """Examples one after another, too: what the first leaves behind must not depend on the cuts either."""
    chosen = data.draw(st.lists(st.sampled_from(CORPUS[name]), min_size=1, max_size=3))
    text = data.draw(st.sampled_from(["", "\n", " and "])).join(example.text for example in chosen)
    text = text[: data.draw(st.integers(0, len(text)))] if data.draw(st.booleans()) else text
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole, parts = read(name, [text], chosen[0].thinking)
    assert accounted(parts) == text
    message, parts = read(name, pieces, chosen[0].thinking)
    assert message == whole
    assert accounted(parts) == text


@pytest.mark.parametrize("name", CORPUS)
@settings(max_examples=examples(80), deadline=None)
@given(data=st.data())
def test_noise_made_of_a_formats_own_signs(name: str, data: st.DataObject) -> None:
    """Never an exception, never a letter lost, never another result for another cut."""
    signs = [*style(name).markers, "{", "}", '"', "'", ":", ",", "[", "]", "name", "arguments", "get_weather", " ", "x"]
    text = "".join(data.draw(st.lists(st.sampled_from(signs), max_size=24)))
    whole, parts = read(name, [text])
    assert accounted(parts) == text
    letters, parts = read(name, list(text))
    assert letters == whole
    assert accounted(parts) == text
