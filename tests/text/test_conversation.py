"""Conversations with tools, for templates that know tools and for those that do not."""

from __future__ import annotations

from typing import Any

import pytest
from small_tokenizers import byte_level

from millstream.errors import BadRequest
from millstream.text.conversation import budget_of, rendering, thinking_words
from millstream.text.style import Style, choose_style
from millstream.text.tokenizer import Tokenizer
from millstream.types import ChatPrompt, Thinking, ToolUse
from support.templates import rendered

TOOL = {"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}
USE = ToolUse((TOOL,))
USER = {"role": "user", "content": "hi"}
CALLED: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}],
}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "seen"}
TALK = (USER, CALLED, RESULT)

KNOWS = (
    "{% if tools %}{{ tools | length }} tools, as <tool_call>;{% endif %}{% for m in messages %}"
    "{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.id }} {{ c.function.name }} {{ ARGUMENTS }}{% endfor %}"
    "{% if m.role == 'tool' %}={{ m.name }}{{ m.tool_call_id }}{% endif %};{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
STRICT = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('no ' + m.role) }}"
    "{% endif %}{{ m.role }}:{{ m.content }};{% endfor %}"
)


def shown(
    template: str, messages: tuple[dict[str, Any], ...] = TALK, tools: ToolUse | None = USE, **more: object
) -> str:
    tokenizer = Tokenizer(byte_level(), chat_template=template)
    style = choose_style(template, lambda token: False)
    return rendered(tokenizer.template, rendering(style, ChatPrompt(messages, dict(more)), tools, Thinking(), None))


@pytest.mark.parametrize("arguments", ["c.function.arguments.at", "c.function.arguments + ''"])
def test_a_template_gets_arguments_as_it_can_take_them(arguments: str) -> None:
    text = shown(KNOWS.replace("ARGUMENTS", arguments))
    found = "it" if arguments.endswith("at") else '{"at": "it"}'
    assert text == f"1 tools, as <tool_call>;user:hi;assistant:call_1 look {found};tool:seen=lookcall_1;"


def test_arguments_that_are_no_json_stay_text() -> None:
    call = {**CALLED, "tool_calls": [{"id": "x", "function": {"name": "look", "arguments": "{oops"}}]}
    assert "look {oops" in shown(KNOWS.replace("ARGUMENTS", "c.function.arguments"), (USER, call))


def test_no_tools_are_shown_where_none_may_be_called() -> None:
    assert "tools" not in shown(KNOWS.replace("ARGUMENTS", "''"), tools=ToolUse((TOOL,), "none"))
    assert "tools" not in shown(KNOWS.replace("ARGUMENTS", "''"), tools=None)


def test_mistral_gets_ids_of_its_own_length() -> None:
    text = shown("[TOOL_CALLS]" + KNOWS.replace("ARGUMENTS", "''").replace("<tool_call>", "x"))
    made = text.split("assistant:")[1].split(" ")[0]
    assert len(made) == 9 and made.isalnum()
    assert text.endswith(f"tool:seen=look{made};")


def test_a_template_without_tools_is_told_in_words() -> None:
    text = shown(PLAIN)
    assert text.startswith("system:") and '"name": "look"' in text and "<tool_call>" in text
    assert 'assistant:<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>;' in text
    assert text.endswith("user:<tool_response>\nseen\n</tool_response>;")


def test_the_words_join_a_system_message_that_is_there() -> None:
    text = shown(PLAIN, ({"role": "system", "content": "Be kind."}, USER))
    assert text.startswith("system:Be kind.\n\n") and text.count("system:") == 1 and '"name": "look"' in text


def test_a_template_that_takes_no_system_message_has_them_in_the_first_of_the_user() -> None:
    text = shown(STRICT)
    assert text.startswith("user:") and '"name": "look"' in text and text.index("look") < text.index("hi;")


def test_what_a_template_refuses_is_said_in_its_words() -> None:
    with pytest.raises(BadRequest, match="no system"):
        shown(STRICT, ({"role": "system", "content": "x"}, {"role": "assistant", "content": "y"}))


def test_calls_are_written_out_where_the_template_does_not_look_at_them() -> None:
    template = "{{ tools }}<tool_call>" + PLAIN
    assert '{"name": "look", "arguments": {"at": "it"}}' in shown(template)
    assert "tool:seen" in shown(template)


def test_what_a_client_says_of_the_template_wins() -> None:
    template = "{{ enable_thinking }}{{ reasoning_effort }}" + PLAIN
    tokenizer = Tokenizer(byte_level(), chat_template=template)
    prompt = ChatPrompt((USER,), {"enable_thinking": True})
    style = choose_style(template, lambda token: False)
    text = rendered(tokenizer.template, rendering(style, prompt, None, Thinking("none"), None))
    assert text.startswith("Truelow")


THINKS = choose_style("<think></think>", lambda token: False)
TAKES_EFFORT = choose_style("<think></think> reasoning_effort", lambda token: False)


@pytest.mark.parametrize(
    ("style", "thinking", "budget"),
    [
        (Style(), Thinking("low", 5), None),
        (THINKS, Thinking(), None),
        (THINKS, Thinking(budget=7), 7),
        (THINKS, Thinking("low"), 1024),
        (THINKS, Thinking("none"), 0),
        (THINKS, Thinking("high"), None),
        (THINKS, Thinking("high", 9), 9),
        (TAKES_EFFORT, Thinking("low"), None),
        (TAKES_EFFORT, Thinking("none"), 0),
    ],
)
def test_an_effort_is_a_budget_where_the_template_does_not_take_the_word(
    style: Style, thinking: Thinking, budget: int | None
) -> None:
    assert budget_of(style, thinking) == budget


def test_templates_are_told_in_the_words_that_they_know() -> None:
    def words(template: str, thinking: Thinking) -> dict[str, object]:
        return thinking_words(choose_style(template, lambda token: False), thinking)

    assert words("enable_thinking", Thinking("none")) == {"enable_thinking": False}
    assert words("enable_thinking", Thinking("low")) == {"enable_thinking": True}
    assert words("thinking", Thinking("none")) == {"thinking": False}
    assert words("reasoning_effort", Thinking("high")) == {"reasoning_effort": "high"}
    assert words("thinking_budget", Thinking(budget=3))["thinking_budget"] == 3
    assert words("plain", Thinking("high", 3)) == {}
