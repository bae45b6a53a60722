"""Chat templates: rendering, error messages and the sandbox."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from millstream.errors import BadRequest, ModelError
from millstream.text.templates.template import ChatTemplate, plain_text

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CHATML = """{{ bos_token }}{% for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
USER = [{"role": "user", "content": "Hi"}]


def render(source: str, messages: Sequence[dict[str, object]] = USER, **kwargs: object) -> str:
    return ChatTemplate(source, TOKENS).render(messages, **kwargs)


def test_renders_a_conversation_with_a_generation_prompt() -> None:
    assert render(CHATML) == "<s><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_the_generation_prompt_can_be_left_out() -> None:
    assert render(CHATML, add_generation_prompt=False) == "<s><|im_start|>user\nHi<|im_end|>\n"


def test_keywords_reach_the_template() -> None:
    assert render("{{ enable_thinking }} {{ tools }} {{ missing }}", enable_thinking=False) == "False None "


def test_client_kwargs_cannot_replace_the_messages() -> None:
    assert ChatTemplate("{{ messages[0].content }}", TOKENS).render(USER, messages=[], self=1) == "Hi"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("plain", "plain"),
        (None, ""),
        ([], ""),
        ([{"type": "text", "text": "one "}, {"type": "text", "text": "two"}], "one two"),
    ],
)
def test_content_becomes_one_string(content: object, expected: str) -> None:
    assert plain_text(content) == expected
    assert render("{{ messages[0].content }}", [{"role": "user", "content": content}]) == expected


def test_content_that_is_missing_is_empty() -> None:
    assert render("[{{ messages[0].content }}]", [{"role": "assistant", "tool_calls": []}]) == "[]"


@pytest.mark.parametrize("content", [7, [{"type": "text"}], [{"type": "text", "text": 3}], [4]])
def test_content_of_another_shape_is_refused(content: object) -> None:
    with pytest.raises(BadRequest) as caught:
        plain_text(content)
    assert caught.value.param == "messages"


def test_an_image_for_a_text_model_is_refused() -> None:
    with pytest.raises(BadRequest, match="image_url"):
        plain_text([{"type": "image_url", "image_url": {"url": "x"}}])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].nothing.deeper }}", "nothing"),
        ("{{ 'a' + messages[0].number }}", "concatenate"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ {}.nothing() }}", "nothing"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    ],
)
def test_errors_of_a_template_reach_the_client(source: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message) as caught:
        render(source, [{"role": "user", "content": "Hi", "number": 7}])
    assert caught.value.param == "messages"


def test_json_is_not_escaped_for_html_and_takes_an_indent() -> None:
    assert render("{{ value | tojson }}", value={"a": "<é>&"}) == '{"a": "<é>&"}'
    assert render("{{ value | tojson(indent=2) }}", value={"a": 1}) == '{\n  "a": 1\n}'


def test_loop_controls_strftime_now_and_the_generation_tag() -> None:
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert re.fullmatch(r"\d{4}", render("{{ strftime_now('%Y') }}"))
    assert render("a{% generation %}{{ messages[0].content }}{% endgeneration %}b") == "aHib"


def test_lines_with_only_a_tag_render_nothing() -> None:
    assert render("  {% if true %}\nyes\n  {% endif %}\n") == "yes\n"


def test_messages_are_not_modified() -> None:
    message: dict[str, object] = {"role": "user", "content": None}
    render("{{ messages }}", [message])
    assert message == {"role": "user", "content": None}


@pytest.mark.parametrize("source", ["{% if %}", "{{ x | no_such_filter }}", "{% nonsense %}"])
def test_a_template_that_does_not_compile_is_a_model_error(source: str) -> None:
    with pytest.raises(ModelError, match="does not compile"):
        ChatTemplate(source, TOKENS)
