"""The output parser: reasoning, stop strings, single calls, void calls."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.text.chat_format import REASONING, ChatFormat
from millstream.text.output.markers import MarkerFinder
from millstream.text.output.parser import Message, OutputParser
from millstream.text.output.parts import Part, PartKind
from millstream.text.tool_formats.registry import FORMATS
from support.tiers import examples

THINK = REASONING["think"]
HERMES = ChatFormat(FORMATS["hermes"], THINK)
SCHEMAS = {"f": {"type": "object"}}
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def parse(
    pieces: Sequence[str], chat_format: ChatFormat | None = HERMES, tools: bool = True, **more: object
) -> Message:
    output = OutputParser(chat_format, SCHEMAS if tools else None, **more)  # type: ignore[arg-type]
    message = Message()
    for piece in pieces:
        message.add(output.push(piece))
    message.add(output.finish())
    return message


@pytest.mark.parametrize(
    ("text", "content", "reasoning"),
    [
        ("<think>\nWhy?\n</think>\n\nSo.", "So.", "Why?"),
        ("<think>Why?</think>So.\n", "So.\n", "Why?"),
        ("<think></think>So.", "So.", ""),
        ("\n<think>Why?</think> So.", "So.", "Why?"),
        ("<think>never ends ", "", "never ends "),
        ("</think>\nSo.", "So.", ""),
        ("No <think>thoughts</think> here.", "No <think>thoughts</think> here.", ""),
        ("<think>a <b> </thin c</think>x", "x", "a <b> </thin c"),
        ("<think>one</think><think>two</think>x", "x", "onetwo"),
        ("<thin", "<thin", ""),
        ("  two blanks", "  two blanks", ""),
        ("", "", ""),
        ("\n", "\n", ""),
    ],
)
def test_reasoning(text: str, content: str, reasoning: str) -> None:
    for pieces in ([text], list(text)):
        message = parse(pieces, tools=False)
        assert (message.content, message.reasoning, message.calls) == (content, reasoning, [])


def test_reasoning_that_the_prompt_opened() -> None:
    assert parse(["Why?\n</thi", "nk>\nSo."], in_reasoning=True) == Message("So.", "Why?")
    assert parse(["<think>Why?</think>So."], in_reasoning=True).content == "So."
    assert parse(["never ends"], in_reasoning=True) == Message("", "never ends")


def test_a_call_inside_reasoning_is_reasoning() -> None:
    assert parse([f"<think>I could write {CALL}</think>No."]) == Message("No.", f"I could write {CALL}")


def test_without_a_chat_format_all_is_content() -> None:
    text = f"<think>a</think>{CALL}"
    assert parse([text], chat_format=None) == Message(text)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("one STOP two", "one ", 0),
        ("<think>STOP</think>one STOP two", "one ", 0),
        (f"one {CALL.replace('1', chr(34) + 'STOP' + chr(34))} two STOP three", "one", 1),
        ("one STO", "one STO", 0),
        ("STOP", "", 0),
    ],
)
def test_stop_strings_apply_to_content_only(text: str, content: str, calls: int) -> None:
    for pieces in ([text], list(text)):
        message = parse(pieces, stops=["STOP"])
        assert message.content.startswith(content) and "STOP" not in message.content
        assert len(message.calls) == calls


def test_a_single_call_ends_the_answer() -> None:
    output = OutputParser(HERMES, SCHEMAS, single=True)
    message = Message()
    message.add(output.push(f"a{CALL}"))
    assert output.ended
    message.add(output.push(f"b{CALL}"))
    message.add(output.finish())
    assert message == Message("a", "", [("f", '{"a": 1}')])


def test_a_call_that_becomes_invalid_after_it_was_emitted_is_void() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1 oops}}</tool_call>'
    output = OutputParser(HERMES, SCHEMAS)
    parts: list[Part] = []
    for char in text:
        parts += output.push(char)
    parts += output.finish()
    kinds = [part.kind for part in parts]
    assert PartKind.CALL in kinds and kinds.count(PartKind.VOID) == 1
    message = Message()
    message.add(parts)
    assert message == Message(text)
    assert output.calls == 0


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": [1, ', "", [("f", '{"a": [1, ')]),
        ('Well.\n<tool_call>{"name": "f", "arguments": {', "Well.", []),
        ('Well.\n<tool_call>{"name": "f', "Well.", []),
        ("Well.\n<tool_call>", "Well.", []),
        ("Well.\n<tool_c", "Well.", []),
        ("1 <", "1 <", []),
        (CALL[:-3], "", [("f", '{"a": 1}')]),
        (CALL + '\n<tool_call>{"name": "f", "arguments": {"b"', "", [("f", '{"a": 1}'), ("f", '{"b"')]),
        ('<tool_call>{"name": "f", "arguments": {"a": oops', '<tool_call>{"name": "f", "arguments": {"a": oops', []),
        ("<think>Well", "", []),
    ],
)
def test_a_call_that_a_limit_cuts_off_is_no_text(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for pieces in ([text], list(text)):
        output = OutputParser(HERMES, SCHEMAS)
        message = Message()
        for piece in pieces:
            message.add(output.push(piece))
        message.add(output.finish(cut=True))
        assert (message.content, message.calls) == (content, calls)


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("hermes", CALL, 0),
        ("hermes", CALL.replace('"f"', '"g"'), 1),
        ("hermes", CALL + CALL.replace('"f"', '"g"'), 1),
        ("hermes", CALL.replace('"f"', '"g"') + CALL, 1),
        ("granite", '<|tool_call|>[{"name": "g", "arguments": {}}, {"name": "f", "arguments": {}}]', 1),
        ("glm", "<tool_call>f</tool_call>", 0),
        ("glm", "<tool_call>g</tool_call>", 1),
    ],
)
def test_a_call_that_is_not_allowed_is_text(name: str, text: str, calls: int) -> None:
    results = []
    for pieces in ([text], list(text)):
        output = OutputParser(ChatFormat(FORMATS[name]), SCHEMAS | {"g": {}}, allowed=frozenset({"g"}))
        parts = [part for piece in pieces for part in output.push(piece)] + output.finish()
        assert "".join(part.source for part in parts) == text
        message = Message()
        message.add(parts)
        assert [called for called, _ in message.calls] == ["g"] * calls
        assert bool(message.content) == ("f" in text.replace("function", ""))
        results.append(message)
    assert results[0] == results[1]


def test_arguments_are_streamed() -> None:
    output = OutputParser(HERMES, SCHEMAS)
    output.push('<tool_call>{"name": "f", "arguments": {')
    (begin, piece) = output.push('"a": [1, ')
    assert (begin.kind, begin.text) == (PartKind.CALL, "f")
    assert (piece.kind, piece.text) == (PartKind.ARGUMENTS, '{"a": [1, ')
    assert [part.text for part in output.push("2]")] == ["2]"]


@given(st.text(alphabet="ab<>", max_size=30), st.lists(st.text(alphabet="ab<>", min_size=1, max_size=4), max_size=4))
@settings(max_examples=examples(300), deadline=None)
def test_a_marker_is_found_where_a_search_in_the_whole_text_finds_it(text: str, markers: list[str]) -> None:
    finder = MarkerFinder(markers)
    position, marker = finder.find(text, final=True)
    candidates = sorted((text.find(each), -len(each), each) for each in markers if each in text)
    assert (position, marker) == ((candidates[0][0], candidates[0][2]) if candidates else (len(text), ""))
    for cut in range(len(text)):
        early, found = finder.find(text[:cut], final=False)
        if found:
            assert (early, found) == (position, marker)
        else:
            assert early <= position


def test_an_answer_without_markers_is_emitted_at_once() -> None:
    output = OutputParser(HERMES, SCHEMAS)
    assert [part.text for part in output.push("Hello")] == ["Hello"]
    assert output.push(" ") == []
    assert [part.text for part in output.push("you <b")] == [" you <b"]
    assert [part.text for part in output.push(" <t")] == []
