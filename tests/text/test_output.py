"""The state machine by itself: thoughts, stop strings, one call only, calls that came to nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.text.marks import Marks
from millstream.text.output import Message, Output
from millstream.text.parts import Kind, Part
from millstream.text.style import REASONING, Style
from millstream.text.tool_formats.registry import FORMATS
from support.tiers import examples

THINK = REASONING["think"]
HERMES = Style(FORMATS["hermes"], THINK)
SCHEMAS = {"f": {"type": "object"}}
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def read(pieces: Sequence[str], style: Style | None = HERMES, tools: bool = True, **more: object) -> Message:
    output = Output(style, SCHEMAS if tools else None, **more)  # type: ignore[arg-type]
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
def test_thoughts(text: str, content: str, reasoning: str) -> None:
    for pieces in ([text], list(text)):
        message = read(pieces, tools=False)
        assert (message.content, message.reasoning, message.calls) == (content, reasoning, [])


def test_thoughts_that_the_prompt_opened() -> None:
    assert read(["Why?\n</thi", "nk>\nSo."], thinking=True) == Message("So.", "Why?")
    assert read(["<think>Why?</think>So."], thinking=True).content == "So."
    assert read(["never ends"], thinking=True) == Message("", "never ends")


def test_a_call_inside_thoughts_is_a_thought() -> None:
    assert read([f"<think>I could write {CALL}</think>No."]) == Message("No.", f"I could write {CALL}")


def test_no_style_is_all_content() -> None:
    text = f"<think>a</think>{CALL}"
    assert read([text], style=None) == Message(text)


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
def test_stop_strings_count_in_content_alone(text: str, content: str, calls: int) -> None:
    for pieces in ([text], list(text)):
        message = read(pieces, stops=["STOP"])
        assert message.content.startswith(content) and "STOP" not in message.content
        assert len(message.calls) == calls


def test_a_single_call_ends_the_answer() -> None:
    output = Output(HERMES, SCHEMAS, single=True)
    message = Message()
    message.add(output.push(f"a{CALL}"))
    assert output.ended
    message.add(output.push(f"b{CALL}"))
    message.add(output.finish())
    assert message == Message("a", "", [("f", '{"a": 1}')])


def test_a_call_that_breaks_after_it_was_told_is_taken_back() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1 oops}}</tool_call>'
    output = Output(HERMES, SCHEMAS)
    parts: list[Part] = []
    for letter in text:
        parts += output.push(letter)
    parts += output.finish()
    kinds = [part.kind for part in parts]
    assert Kind.CALL in kinds and kinds.count(Kind.VOID) == 1
    message = Message()
    message.add(parts)
    assert message == Message(text)
    assert output.calls == 0


def test_arguments_are_told_as_they_come() -> None:
    output = Output(HERMES, SCHEMAS)
    output.push('<tool_call>{"name": "f", "arguments": {')
    (begin, piece) = output.push('"a": [1, ')
    assert (begin.kind, begin.text) == (Kind.CALL, "f")
    assert (piece.kind, piece.text) == (Kind.ARGUMENTS, '{"a": [1, ')
    assert [part.text for part in output.push("2]")] == ["2]"]


@given(st.text(alphabet="ab<>", max_size=30), st.lists(st.text(alphabet="ab<>", min_size=1, max_size=4), max_size=4))
@settings(max_examples=examples(300), deadline=None)
def test_a_marker_is_found_where_a_search_in_the_whole_text_finds_it(text: str, texts: list[str]) -> None:
    marks = Marks(texts)
    place, marker = marks.find(text, final=True)
    candidates = sorted((text.find(mark), -len(mark), mark) for mark in texts if mark in text)
    assert (place, marker) == ((candidates[0][0], candidates[0][2]) if candidates else (len(text), ""))
    for cut in range(len(text)):
        early, found = marks.find(text[:cut], final=False)
        if found:
            assert (early, found) == (place, marker)
        else:
            assert early <= place


def test_an_answer_without_markers_is_let_through_at_once() -> None:
    output = Output(HERMES, SCHEMAS)
    assert [part.text for part in output.push("Hello")] == ["Hello"]
    assert output.push(" ") == []
    assert [part.text for part in output.push("you <b")] == [" you <b"]
    assert [part.text for part in output.push(" <t")] == []
