"""Template input of conversations with tools, for templates with and without tool support."""

from __future__ import annotations

from typing import Any

import pytest
from small_tokenizers import byte_level

from millstream.errors import BadRequest
from millstream.text.chat_format import ChatFormat, detect_chat_format
from millstream.text.templates.conversation import reasoning_budget, reasoning_kwargs, template_input
from millstream.text.tokenizer import Tokenizer
from millstream.types import ChatPrompt, Thinking, ToolUse
from support.templates import abilities_of, rendered

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

WITH_TOOLS = (
    "{% if tools %}{{ tools[0].function.name }} as <tool_call>;{% endif %}{% for m in messages %}"
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
    chat_format = detect_chat_format(template, lambda token: False)
    prompt = ChatPrompt(messages, dict(more))
    abilities = abilities_of(tokenizer.template)
    return rendered(tokenizer.template, template_input(chat_format, prompt, tools, Thinking(), None, abilities))


@pytest.mark.parametrize("arguments", ["c.function.arguments.at", "c.function.arguments + ''"])
def test_a_template_gets_arguments_as_object_or_string(arguments: str) -> None:
    text = shown(WITH_TOOLS.replace("ARGUMENTS", arguments))
    found = "it" if arguments.endswith("at") else '{"at": "it"}'
    assert text == f"look as <tool_call>;user:hi;assistant:call_1 look {found};tool:seen=lookcall_1;"


def test_arguments_that_are_not_json_stay_text() -> None:
    call = {**CALLED, "tool_calls": [{"id": "x", "function": {"name": "look", "arguments": "{oops"}}]}
    assert "look {oops" in shown(WITH_TOOLS.replace("ARGUMENTS", "c.function.arguments"), (USER, call))


def test_tools_are_left_out_with_tool_choice_none() -> None:
    template = WITH_TOOLS.replace("ARGUMENTS", "c.function.arguments")
    assert "look as" in shown(template)
    assert "look as" not in shown(template, tools=ToolUse((TOOL,), "none"))
    assert "look as" not in shown(template, tools=None)


def test_ids_are_converted_for_mistral() -> None:
    template = WITH_TOOLS.replace("ARGUMENTS", "c.function.arguments").replace("<tool_call>", "x")
    text = shown("[TOOL_CALLS]" + template)
    made = text.split("assistant:")[1].split(" ")[0]
    assert len(made) == 9 and made.isalnum()
    assert text.endswith(f"tool:seen=look{made};")


def test_tools_go_into_the_system_message_if_the_template_has_none() -> None:
    text = shown(PLAIN)
    assert text.startswith("system:") and '"name": "look"' in text and "<tool_call>" in text
    assert 'assistant:<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>;' in text
    assert text.endswith("user:<tool_response>\nseen\n</tool_response>;")


def test_tools_are_appended_to_an_existing_system_message() -> None:
    text = shown(PLAIN, ({"role": "system", "content": "Be kind."}, USER))
    assert text.startswith("system:Be kind.\n\n") and text.count("system:") == 1 and '"name": "look"' in text


def test_tools_go_into_the_first_user_message_if_the_template_has_no_system_role() -> None:
    text = shown(STRICT)
    assert text.startswith("user:") and '"name": "look"' in text and text.index("look") < text.index("hi;")


def test_the_error_carries_the_templates_message() -> None:
    with pytest.raises(BadRequest, match="not today"):
        shown("{% if 'seen' in messages[-1].content %}{{ raise_exception('not today') }}{% endif %}" + PLAIN)


def test_calls_become_content_if_the_template_does_not_render_them() -> None:
    template = "{{ tools }}<tool_call>" + PLAIN
    assert '{"name": "look", "arguments": {"at": "it"}}' in shown(template)
    assert "tool:seen" in shown(template)


def test_template_kwargs_of_the_client_take_precedence() -> None:
    template = "{{ enable_thinking }}{{ reasoning_effort }}" + PLAIN
    tokenizer = Tokenizer(byte_level(), chat_template=template)
    prompt = ChatPrompt((USER,), {"enable_thinking": True})
    chat_format = detect_chat_format(template, lambda token: False)
    text = rendered(tokenizer.template, template_input(chat_format, prompt, None, Thinking("none"), None))
    assert text.startswith("Truelow")


REASONS = detect_chat_format("<think></think>", lambda token: False)
TAKES_EFFORT = detect_chat_format("<think></think> reasoning_effort", lambda token: False)


@pytest.mark.parametrize(
    ("chat_format", "thinking", "budget"),
    [
        (ChatFormat(), Thinking("low", 5), None),
        (REASONS, Thinking(), None),
        (REASONS, Thinking(budget=7), 7),
        (REASONS, Thinking("low"), 1024),
        (REASONS, Thinking("none"), 0),
        (REASONS, Thinking("high"), None),
        (REASONS, Thinking("high", 9), 9),
        (TAKES_EFFORT, Thinking("low"), None),
        (TAKES_EFFORT, Thinking("none"), 0),
    ],
)
def test_effort_becomes_a_budget_if_the_template_has_no_reasoning_effort(
    chat_format: ChatFormat, thinking: Thinking, budget: int | None
) -> None:
    assert reasoning_budget(chat_format, thinking) == budget


def test_reasoning_kwargs_are_those_that_the_template_mentions() -> None:
    def kwargs_for(template: str, thinking: Thinking) -> dict[str, object]:
        return reasoning_kwargs(detect_chat_format(template, lambda token: False), thinking)

    assert kwargs_for("enable_thinking", Thinking("none")) == {"enable_thinking": False}
    assert kwargs_for("enable_thinking", Thinking("low")) == {"enable_thinking": True}
    assert kwargs_for("thinking", Thinking("none")) == {"thinking": False}
    assert kwargs_for("reasoning_effort", Thinking("high")) == {"reasoning_effort": "high"}
    assert kwargs_for("thinking_budget", Thinking(budget=3))["thinking_budget"] == 3
    assert kwargs_for("plain", Thinking("high", 3)) == {}
