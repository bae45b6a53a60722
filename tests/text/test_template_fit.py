"""Unusual conversations with templates that refuse, drop or move messages: all of it is rendered, in order, and a new
turn extends the prompt of the turn before."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.text.chat_format import detect_chat_format
from millstream.text.templates.abilities import ABLE, STRICT, Arguments, SystemRole, TemplateAbilities, TextWithCalls
from millstream.text.templates.conversation import TemplateInput, template_input
from millstream.text.templates.template import TemplateSource
from millstream.types import ChatPrompt, Thinking, ToolUse
from support.template_shapes import SHAPES
from support.templates import abilities_of, rendered

Message = dict[str, Any]

PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}}
USE = ToolUse(({"type": "function", "function": {"name": "look", "description": "", "parameters": PARAMETERS}},))


def prompt_of(
    shape: str, messages: list[Message], tools: ToolUse | None = None, *, continue_final: bool = False
) -> str:
    """Renders with the fitted messages alone: the last resort of a failed rendering is not used."""
    source = TemplateSource(SHAPES[shape], {})
    chat_format = detect_chat_format(source.source + "<tool_call>", lambda token: False)
    abilities = abilities_of(source)
    prompt = ChatPrompt(tuple(messages), continue_final=continue_final)
    given = template_input(chat_format, prompt, tools, Thinking(), None, abilities)
    return rendered(source, TemplateInput(given.variants[:1], given.kwargs, given.continues))


def system(word: object) -> Message:
    return {"role": "system", "content": word}


def user(word: object) -> Message:
    return {"role": "user", "content": word}


def assistant(word: object, *called: tuple[str, str]) -> Message:
    calls = [
        {"id": name, "type": "function", "function": {"name": "look", "arguments": json.dumps({"at": word})}}
        for name, word in called
    ]
    return {"role": "assistant", "content": word, **({"tool_calls": calls} if calls else {})}


def result(name: str, word: object) -> Message:
    return {"role": "tool", "tool_call_id": name, "content": word}


def parts(*words: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": word} for word in words]


ODD: dict[str, list[Message]] = {
    "several systems": [system("w1."), system("w2."), user("w3.")],
    "a system message later": [system("w1."), user("w2."), assistant("w3."), system("w4."), user("w5.")],
    "a system message last": [user("w1."), assistant("w2."), system("w3.")],
    "a system message after the user's": [user("w1."), system("w2."), user("w3.")],
    "only a system message": [system("w1.")],
    "two of one role": [user("w1."), user("w2."), assistant("w3."), assistant("w4."), user("w5.")],
    "the assistant first": [assistant("w1."), user("w2.")],
    "system and assistant": [system("w1."), assistant("w2."), user("w3.")],
    "the assistant last": [user("w1."), assistant("w2.")],
    "parts": [system(parts("w1.", "w2.")), user(parts("w3.")), assistant(parts("w4.")), user("w5.")],
    "parts later": [user("w1."), assistant(parts("w2.")), system(parts("w3.", "w4."))],
    "null and empty": [system(None), user(""), assistant(None), user("w1."), assistant(""), user("w2.")],
    "a result without a call": [user("w1."), result("a", "w2.")],
    "parts in a result": [user("w1."), assistant(None, ("a", "w2.")), result("a", parts("w3.", "w4."))],
    "a call without a result": [user("w1."), assistant("", ("a", "w2.")), user("w3.")],
    "user after a result": [user("w1."), assistant(None, ("a", "w2.")), result("a", "w3."), user("w4.")],
    "system after a result": [user("w1."), assistant(None, ("a", "w2.")), result("a", "w3."), system("w4.")],
    "text and call": [user("w1."), assistant("w2.", ("a", "w3.")), result("a", "w4."), assistant("w5."), user("w6.")],
    "a call first": [assistant(None, ("a", "w1.")), result("a", "w2.")],
}


@pytest.mark.parametrize("tools", [None, USE], ids=["", "tools"])
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("shape", SHAPES)
def test_unusual_conversations_are_rendered_whole_and_in_order(shape: str, odd: str, tools: ToolUse | None) -> None:
    text = prompt_of(shape, ODD[odd], tools)
    words = [f"w{number}." for number in range(1, 7) if f"w{number}." in json.dumps(ODD[odd])]
    assert [text.count(word) for word in words] == [1] * len(words)
    assert sorted(words, key=text.index) == words
    assert "None" not in text and "'type'" not in text
    assert text.endswith("<assistant>")


@pytest.mark.parametrize("shape", SHAPES)
def test_every_call_comes_with_its_result(shape: str) -> None:
    called = assistant(None, ("a", "w1."), ("b", "w2."))
    text = prompt_of(shape, [user("w0."), called, result("b", "w3."), result("a", "w4.")], USE)
    assert [text.count(f"w{number}.") for number in range(5)] == [1] * 5


def test_what_each_shape_can_render_is_found() -> None:
    found = {shape: abilities_of(TemplateSource(source, {})) for shape, source in SHAPES.items()}
    assert found["anywhere"] == TemplateAbilities(keeps_reasoning=False)
    assert found["parts"] == found["anywhere"]
    assert found["drops"].system is found["gathers"].system is SystemRole.FIRST
    assert found["refuses"].user_first and found["refuses"].arguments is Arguments.OBJECT
    assert found["no-system"].system is SystemRole.NONE and found["no-system"].alternates
    assert not found["no-system"].tools and not found["no-system"].calls
    assert found["alternates"].blank_assistant == " " and not found["alternates"].user_after_result
    assert found["single-calls"].text_with_calls is TextWithCalls.APART and not found["single-calls"].parallel_calls
    assert found["gathers"].arguments is Arguments.STRING and not found["gathers"].orphan_results
    for abilities in (*found.values(), ABLE, STRICT):
        assert TemplateAbilities.from_json(json.loads(json.dumps(abilities.to_json()))) == abilities


def test_a_later_system_message_is_marked_as_one() -> None:
    text = prompt_of("drops", [user("Hi."), assistant("Yes?"), system("Be brief."), user("Go on.")])
    note = "[System message]\nBe brief.\n[End of system message]"
    assert f"<user>{note}\n\nGo on.</user>" in text


def test_system_text_comes_before_the_first_user_message_if_there_is_no_system_role() -> None:
    text = prompt_of("no-system", [system("Be kind."), user("Hi."), assistant("Yes?"), user("Go on.")])
    assert text.startswith("<user>Be kind.\n\nHi.</user>")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("start", ["w2. ", "", [{"type": "text", "text": "w2."}]])
def test_the_last_message_can_be_continued(shape: str, start: Any) -> None:
    text = prompt_of(shape, [user("w1."), assistant(start)], continue_final=True)
    ending = start if isinstance(start, str) else "w2."
    assert text.endswith(f"<assistant>{ending}" if ending or shape != "alternates" else "<assistant> ")
    whole = prompt_of(shape, [user("w1."), assistant(f"{ending}and more"), user("w3.")])
    assert ending == "" or whole.startswith(text)


def test_only_text_of_the_assistant_is_continued() -> None:
    for last in (user("w1."), assistant(None, ("a", "w1."))):
        messages = [user("w0."), last]
        assert prompt_of("anywhere", messages, continue_final=True) == prompt_of("anywhere", messages)


def test_what_a_template_renders_as_it_is_stays_as_it_is() -> None:
    messages = [user("a"), user("b"), assistant("c"), system("d")]
    expected = "<user>a</user><user>b</user><assistant>c</assistant><system>d</system><assistant>"
    assert prompt_of("anywhere", messages) == expected


UNPROBED = "{% if messages | length == 7 and messages[6].role != 'user' %}{{ raise_exception('no') }}{% endif %}"


def test_a_refusal_that_no_probe_has_met_falls_back_to_plain_turns() -> None:
    source = TemplateSource(UNPROBED + SHAPES["anywhere"], {})
    messages = [user("a1"), assistant("b1"), user("c1"), assistant("d1"), user("e1"), assistant("f1"), system("g1")]
    chat_format = detect_chat_format(source.source, lambda token: False)
    given = template_input(chat_format, ChatPrompt(tuple(messages)), None, Thinking(), None, abilities_of(source))
    text = rendered(source, given)
    assert all(str(message["content"]) in text for message in messages)


MOVES_SYSTEM = (
    "{% for m in messages %}{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
KEEPS_REASONING = "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}{{ m.content }}{% endfor %}"
TOOLS_LAST = (
    "{% for m in messages %}{% if loop.last and tools %}{{ tools | tojson }}{% endif %}<{{ m.role }}>{{ m.content }}"
    "{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "reasons", "words"),
    [
        (SHAPES["anywhere"], False, []),
        (SHAPES["anywhere"], True, ["reasoning"]),
        (KEEPS_REASONING, True, []),
        (MOVES_SYSTEM, False, ["anew"]),
        (TOOLS_LAST, False, ["with tools"]),
    ],
)
def test_the_log_says_why_a_template_breaks_the_prefix(source: str, reasons: bool, words: list[str]) -> None:
    notes = abilities_of(TemplateSource(source, {})).prefix_notes(reasons=reasons)
    assert len(notes) == len(words) and all(word in note for word, note in zip(words, notes, strict=True))


@st.composite
def turns(draw: st.DrawFn) -> list[list[Message]]:
    """Returns a conversation after each of its turns: what a client sends, then what the model answers."""
    numbers = itertools.count()

    def word() -> str:
        return f"w{next(numbers)}."

    def content() -> object:
        return draw(st.sampled_from(["", None, word(), word(), parts(word(), word())]))

    def sent(names: list[str]) -> list[Message]:
        rest = draw(st.lists(st.sampled_from(["user", "system", "assistant", "orphan"]), max_size=3))
        if not names and not rest:
            rest = ["user"]
        if rest and rest[-1] == "assistant":  # that would continue the assistant's turn
            rest.append("user")
        return [result(name, content()) for name in names] + [
            result("gone", content()) if role == "orphan" else {"role": role, "content": content()} for role in rest
        ]

    conversation: list[Message] = []
    names: list[str] = []
    found = []
    for _ in range(draw(st.integers(2, 4))):
        conversation = [*conversation, *sent(names)]
        found.append(conversation)
        names = [f"call{next(numbers):05d}" for _ in range(draw(st.integers(0, 2)))]
        conversation = [*conversation, assistant(content() if names else word(), *((name, word()) for name in names))]
    return found


@settings(max_examples=60, deadline=None)
@given(conversation=turns(), with_tools=st.booleans())
@pytest.mark.parametrize("shape", SHAPES)
def test_a_turn_extends_the_prompt_of_the_turn_before(
    shape: str, conversation: list[list[Message]], with_tools: bool
) -> None:
    prompts = [prompt_of(shape, messages, USE if with_tools else None) for messages in conversation]
    for messages, before, after in zip(conversation[1:], prompts, prompts[1:], strict=False):
        assert after.startswith(before)
        words = [part for part in json.dumps(messages).replace("\\", "").split('"') if part[:1] == "w" and "." in part]
        assert all(after.count(word) == 1 for word in words)
