"""Answers that are nothing but calls in JSON, without markers: however they are cut, and what is not such an answer."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.text.chat_format import REASONING, ChatFormat
from millstream.text.output.parser import Message, OutputParser
from millstream.text.output.parts import PartKind
from millstream.text.output.whole_answer import MAX_HELD
from millstream.text.tool_formats.registry import FORMATS
from support.tiers import examples

HERMES = ChatFormat(FORMATS["hermes"], REASONING["think"])
SCHEMAS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"enum": ["celsius", "fahrenheit"]},
            "place": {"$ref": "#/$defs/place"},
        },
        "required": ["city"],
        "$defs": {"place": {"type": "object", "properties": {"north": {"type": "number"}}, "required": ["north"]}},
    },
    "now": {"type": "object", "properties": {}},
    "log": {"type": "object", "additionalProperties": {"type": "string"}},
}
OSLO = {"city": "Oslo"}
CALL = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
PRETTY = json.dumps(json.loads(CALL), indent=2)
NOW = '{"name": "now", "arguments": {}}'

CALLS = {
    "fenced, as Qwen2.5-Coder writes it": (f"```json\n{PRETTY}\n```", ["get_weather"]),
    "without a language": (f"```\n{CALL}\n```\n", ["get_weather"]),
    "on one line": (f"```json {CALL}```", ["get_weather"]),
    "bare": (CALL, ["get_weather"]),
    "after white space": (f"\n {CALL}\n", ["get_weather"]),
    "list": (f"[{CALL}, {NOW}]", ["get_weather", "now"]),
    "fenced list": (f"```json\n[\n  {CALL},\n  {NOW}\n]\n```", ["get_weather", "now"]),
    "lines": (f"{CALL}\n{NOW}", ["get_weather", "now"]),
    "the tag of the list of tools": (f"<tools>\n{CALL}\n</tools>", ["get_weather"]),
    "fenced tag": (f"```xml\n<function_call>\n{CALL}\n</function_call>\n```", ["get_weather"]),
    "no closing fence": (f"```json\n{CALL}\n", ["get_weather"]),
    "parameters": (CALL.replace("arguments", "parameters"), ["get_weather"]),
    "arguments first": ('{"arguments": {"city": "Oslo"}, "name": "get_weather"}', ["get_weather"]),
    "arguments as text": (json.dumps({"name": "get_weather", "arguments": json.dumps(OSLO)}), ["get_weather"]),
    "OpenAI's shape": (json.dumps({"type": "function", "function": json.loads(CALL)}), ["get_weather"]),
    "after reasoning": (f"<think>Hm.</think>\n\n```json\n{CALL}\n```", ["get_weather"]),
    "a fence in an argument": (CALL.replace("Oslo", "```\\n<tool_call>"), ["get_weather"]),
    "a reference": (CALL.replace('"Oslo"', '"Oslo", "place": {"north": 59.9}'), ["get_weather"]),
    "other properties that are allowed": ('{"name": "log", "arguments": {"a": "b"}}', ["log"]),
}
TEXTS = {
    "text before": f"Sure:\n```json\n{CALL}\n```",
    "text after": f"```json\n{CALL}\n```\nThis calls the function.",
    "another language": f"```python\n{CALL}\n```",
    "unknown function": CALL.replace("get_weather", "get_time"),
    "one of two unknown": f"[{CALL}, {NOW.replace('now', 'later')}]",
    "a required argument is missing": CALL.replace("city", "town"),
    "unknown argument": CALL.replace('"Oslo"', '"Oslo", "zip": 1'),
    "wrong type": CALL.replace('"Oslo"', "1"),
    "a truth value is no integer": CALL.replace('"Oslo"', '"Oslo", "days": true'),
    "not in the enumeration": CALL.replace('"Oslo"', '"Oslo", "unit": "kelvin"'),
    "a reference that does not fit": CALL.replace('"Oslo"', '"Oslo", "place": {}'),
    "no arguments": '{"name": "now"}',
    "the tool itself": json.dumps({"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}),
    "more keys": '{"name": "now", "arguments": {}, "answer": 42}',
    "other JSON": '{"city": "Oslo", "arguments": {}}',
    "list of numbers": "[1, 2, 3]",
    "empty list": "[]",
    "incomplete": CALL[:-2],
    "incomplete list": f"[{CALL}",
    "a fence and nothing else": "```json\n```",
    "a fence only": "```",
    "code": "```\nx = 1\n```",
    "too long": CALL.replace("Oslo", "O" * MAX_HELD),
    "single quotes": CALL.replace('"', "'"),
    "two fences": f"```json\n{CALL}\n```\n```json\n{NOW}\n```",
}


def parse(pieces: Sequence[str], cut: bool = False, **more: object) -> Message:
    output = OutputParser(HERMES, SCHEMAS, unmarked=True, **more)  # type: ignore[arg-type]
    parts = [part for piece in pieces for part in output.push(piece)] + output.finish(cut=cut)
    assert "".join(part.source for part in parts) == "".join(pieces)
    message = Message()
    message.add(parts)
    return message


@pytest.mark.parametrize("name", CALLS)
def test_the_whole_answer_is_calls(name: str) -> None:
    text, called = CALLS[name]
    message = parse([text])
    assert [call for call, _ in message.calls] == called and not message.content
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in message.calls)
    assert parse(list(text)) == parse(list(text), cut=True) == message


@pytest.mark.parametrize("name", TEXTS)
def test_other_answers_are_text(name: str) -> None:
    text = TEXTS[name]
    step = len(text) // 500 + 1
    for pieces in ([text], [text[start : start + step] for start in range(0, len(text), step)]):
        assert parse(pieces) == Message(text)


@settings(max_examples=examples(300), deadline=None)
@given(data=st.data())
def test_the_result_does_not_depend_on_the_pieces(data: st.DataObject) -> None:
    noise = ["```", "json", "\n", "<tools>", "</tools>", "[", "]", ",", CALL, NOW, "{", '"name"', "x", "<tool_call>"]
    text = "".join(data.draw(st.lists(st.sampled_from(noise), max_size=8)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    cut = data.draw(st.booleans())
    assert parse([text], cut) == parse(pieces, cut)


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("Hello", ""),
        ("```python\n", ""),
        ('```json\n{\n  "answer', '```json\n{\n  "answer'),
        ('```json\n{\n  "answer"', ""),
        ('{"name": "Alice"', ""),
        ('{"name": "get_weather", "arguments": {"city', '{"name": "get_weather", "arguments": {"city'),
        ("{}", ""),
        ("[[", ""),
        ("[1", ""),
    ],
)
def test_text_is_released_as_soon_as_it_cannot_be_a_call(text: str, held: str) -> None:
    output = OutputParser(HERMES, SCHEMAS, unmarked=True)
    emitted = "".join(part.text for char in text for part in output.push(char))
    assert emitted.rstrip() == text[: len(text) - len(held)].rstrip()


def test_a_format_with_calls_that_have_no_marker_keeps_its_own_rules() -> None:
    output = OutputParser(ChatFormat(FORMATS["llama"]), SCHEMAS, unmarked=True)
    kinds = [part.kind for part in output.push(CALL)]
    assert kinds == [PartKind.CALL, PartKind.ARGUMENTS], "streamed, not held back"


def test_a_function_that_is_not_allowed_is_text() -> None:
    assert parse([CALL], allowed=frozenset({"now"})) == Message(CALL)
    assert parse([NOW], allowed=frozenset({"now"})).calls == [("now", "{}")]


def test_without_the_option_it_is_text() -> None:
    output = OutputParser(HERMES, SCHEMAS)
    message = Message()
    message.add([*output.push(CALL), *output.finish()])
    assert message == Message(CALL)
