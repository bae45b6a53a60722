"""The output parser: reasoning, stop strings, single calls, void calls."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.text.chat_format import REASONING, ChatFormat, detect_chat_format
from millstream.text.detokenizer import ByteDetokenizer
from millstream.text.output.markers import MarkerFinder
from millstream.text.output.parser import Message, OutputParser, ReasoningWatch
from millstream.text.output.parts import Part, PartKind
from millstream.text.tool_formats.registry import FORMATS
from millstream.types import ReasoningLimit
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


def test_a_limit_within_the_end_of_the_reasoning_leaves_nothing_of_it() -> None:
    output, message = OutputParser(HERMES, in_reasoning=True), Message()
    message.add(output.push("Why?\n</thin"))
    message.add(output.finish(cut=True))
    assert message == Message("", "Why?")


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


WATCHED = [("none", "think"), ("hermes", "think"), ("harmony", "harmony"), ("gemma", "gemma"), ("mistral", "mistral")]


@pytest.mark.parametrize("names", WATCHED)
@given(data=st.data())
@settings(max_examples=examples(200), deadline=None)
def test_what_watches_a_reasoning_agrees_with_the_parser(names: tuple[str, str], data: st.DataObject) -> None:
    """However tokens are pushed, it forces the closing where the parser has counted so many reasoning tokens; it has
    said before that this is due, and lets no draft go further."""
    chat_format = detect_chat_format(None, lambda name: False, *names)
    assert chat_format.reasoning is not None
    markers = sorted(set(chat_format.markers))
    halves = [half for marker in markers for half in (marker[:3], marker[3:]) if half]
    texts = [*markers, *halves, "a", " b", "\n", "\n\n", "<", ">", "]", "<think> in a text", "\u00e9"]
    pieces = {number: text.encode() for number, text in enumerate(texts)}
    closing = tuple(texts.index(text) for text in (chat_format.reasoning.closes[0], "\n\n"))
    opened, tools = data.draw(st.booleans()), names[0] != "none"
    limit = ReasoningLimit(data.draw(st.integers(0, 6)), closing, names, opened, tools)
    marks = st.sampled_from(
        [texts.index(each) for each in (*chat_format.reasoning.opens, *chat_format.reasoning.closes)]
    )
    drawn = data.draw(st.lists(marks | st.integers(0, len(texts) - 1), max_size=20))
    draft = tuple(data.draw(st.lists(marks | st.integers(0, len(texts) - 1), min_size=1, max_size=6)))

    def watch() -> ReasoningWatch:
        return ReasoningWatch(limit, lambda: ByteDetokenizer(pieces, 0))

    subject, parser, count, written = (
        watch(),
        OutputParser(chat_format, {} if tools else None, in_reasoning=opened),
        0,
        [],
    )
    forced: tuple[int, ...] = ()
    for token in drawn:
        was_due, room = subject.due, subject.room(draft)
        follower = watch()
        follower.push(written)
        for number in range(room + 1):
            assert not follower.forced or room == 0
            follower.push(draft[number : number + 1])
        token = (forced or (token,))[0]
        was = parser.in_reasoning
        parser.push(texts[token])
        written.append(token)
        subject.push((token,))
        count += was or parser.in_reasoning
        if forced:
            forced = forced[1:]
        if not forced and parser.in_reasoning and count >= limit.tokens:
            forced = closing
        assert subject.forced == forced
        assert was_due or not forced
        if subject.over:
            break
    for cut in {0, len(written) // 2, len(written)}:
        again = watch()
        again.push(written[:cut])
        again.push(written[cut:])
        assert again.forced == forced
