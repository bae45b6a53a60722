"""`tools` and `tool_choice` of Anthropic's API: what the model gets to see. Scripted service, real HTTP."""

from __future__ import annotations

import logging

import pytest

PATH = "/v1/messages"
BODY = {"max_tokens": 16, "messages": [{"role": "user", "content": "hi"}]}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "The weather", "input_schema": SCHEMA}
FUNCTION = {"name": "weather", "description": "The weather", "parameters": SCHEMA}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}


@pytest.fixture
def tools(http, service):
    """The tools that the service got for these."""

    def send(*items: object, **more: object):
        response = http.post(PATH, json=BODY | {"tools": list(items)} | more)
        assert response.status_code == 200, response.text
        return service.requests[-1].tools

    return send


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"type": "custom"},
        {"type": None, "strict": True, "defer_loading": True, "eager_input_streaming": True},
        {"cache_control": {"type": "ephemeral"}, "input_examples": [{"city": "Bern"}], "allowed_callers": ["direct"]},
    ],
)
def test_tools(tools, more):
    found = tools(WEATHER | more)
    assert found.tools == ({"type": "function", "function": FUNCTION},)
    assert (found.choice, found.name, found.parallel) == ("auto", None, True)


def test_a_tool_without_a_schema_takes_no_arguments(tools):
    (tool,) = tools({"name": "now"}).tools
    assert tool["function"] == {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize(
    "choice, expected",
    [
        ({"type": "auto"}, ("auto", None, True)),
        ({"type": "auto", "disable_parallel_tool_use": True}, ("auto", None, False)),
        ({"type": "any", "disable_parallel_tool_use": False}, ("required", None, True)),
        ({"type": "tool", "name": "weather", "disable_parallel_tool_use": True}, ("required", "weather", False)),
        ({"type": "none"}, ("none", None, True)),
        (None, ("auto", None, True)),
    ],
)
def test_tool_choice(tools, choice, expected):
    found = tools(WEATHER, tool_choice=choice)
    assert (found.choice, found.name, found.parallel) == expected


@pytest.mark.parametrize("choice", [None, {"type": "auto"}, {"type": "none"}])
def test_a_choice_without_tools(tools, choice):
    assert tools(tool_choice=choice) is None


@pytest.mark.parametrize(
    "kind, name, arguments",
    [
        ("bash_20250124", "bash", {"command", "restart"}),
        ("text_editor_20250728", "str_replace_based_edit_tool", {"command", "path", "old_str", "file_text"}),
        ("memory_20250818", "memory", {"command", "path", "old_path"}),
    ],
)
def test_tools_that_the_client_runs_get_their_schema(tools, kind, name, arguments):
    (tool,) = tools({"type": kind, "name": name, "max_characters": 100}).tools
    function = tool["function"]
    assert function["name"] == name and function["description"]
    assert arguments <= function["parameters"]["properties"].keys()


def test_tools_that_run_at_anthropic_are_left_out_and_the_log_says_so_once(tools, open_client, caplog):
    hosted = [
        SEARCH,
        {"type": "web_fetch_20250910", "name": "web_fetch"},
        {"type": "code_execution_20250825", "name": "code_execution"},
        {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
        {"type": "computer_20250124", "name": "computer", "display_width_px": 9, "display_height_px": 9},
        {"type": "mcp_toolset", "mcp_server_name": "s"},
    ]
    with caplog.at_level(logging.WARNING, logger="millstream.api.anthropic.tools"):
        client = open_client(body_limit=10_000)
        for _ in range(2):
            assert client.post(PATH, json=BODY | {"tools": [*hosted, WEATHER]}).status_code == 200
    said = " runs at Anthropic only: models here do not see it."
    assert {record.getMessage() for record in caplog.records} == {f"The tool {tool['type']}{said}" for tool in hosted}
    assert len(caplog.records) == len(hosted)
    assert [tool["function"]["name"] for tool in tools(*hosted, WEATHER).tools] == ["weather"]
    assert tools(SEARCH) is None


@pytest.mark.parametrize(
    "items, choice, words",
    [
        ([SEARCH], {"type": "tool", "name": "web_search"}, ["tool_choice"]),
        ([SEARCH, WEATHER], {"type": "tool", "name": "web_search"}, ["tool_choice", "web_search", "Anthropic"]),
        ([WEATHER], {"type": "tool", "name": "other"}, ["tool_choice.name", "'other'", "weather"]),
        ([WEATHER], {"type": "tool"}, ["tool_choice.name"]),
        ([WEATHER], {"type": "required"}, ["tool_choice", '"any"']),
        ([WEATHER], "auto", ["tool_choice"]),
        ([WEATHER], {"type": "any", "disable_parallel_tool_use": "yes"}, ["disable_parallel_tool_use"]),
        ([], {"type": "any"}, ["tool_choice"]),
        ([WEATHER, WEATHER], None, ["tools", "two", "'weather'"]),
        ([{"name": "a b"}], None, ["tools[0].name"]),
        ([WEATHER | {"input_schema": {"type": "array"}}], None, ["tools[0].input_schema.type"]),
        ([WEATHER | {"input_schema": []}], None, ["tools[0].input_schema"]),
        ([{"type": "function", "function": FUNCTION}], None, ["tools[0].type", "custom"]),
        ([7], None, ["tools[0]"]),
        ("weather", None, ["tools"]),
    ],
)
def test_wrong_tools(http, service, items, choice, words):
    response = http.post(PATH, json=BODY | {"tools": items, "tool_choice": choice})
    error = response.json()["error"]
    assert response.status_code == 400 and error["type"] == "invalid_request_error"
    assert all(word in error["message"] for word in words), error["message"]
    assert not service.requests
