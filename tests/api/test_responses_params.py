"""Parameters of the Responses API: what reaches the service, what is echoed, and what is refused."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from millstream.api.app import create_app
from millstream.types import Grammar, Sampling
from support.responses import Scripts, Tools, check_response
from support.services import services

PATH = "/v1/responses"
F = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
C = {"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}}
N = {"type": "namespace", "name": "n", "description": "d", "tools": [F | {"name": "g"}]}
M = {"type": "mcp", "server_label": "wiki", "require_approval": "never"}
USER = {"role": "user", "content": "hi"}
RESPONSE = f"resp_{'0' * 32}"


@pytest.fixture(scope="module")
def service() -> Scripts:
    return Scripts()


@pytest.fixture(scope="module")
def http(service, serve_module) -> Iterator[httpx.Client]:
    app = create_app(services(service, tool_servers=Tools()), body_limit=1_000_000)
    with serve_module(app) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        yield client


@pytest.fixture(autouse=True)
def fresh(service) -> None:
    service.reset()


def accepted(http: httpx.Client, **body: object) -> dict[str, Any]:
    response = http.post(PATH, json={"input": "hi", **body})
    assert response.status_code == 200, response.text
    return response.json()


def test_parameters_reach_the_service(http, service):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    accepted(
        http,
        model="m",
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        seed=3,
        max_output_tokens=100.0,
        reasoning={"effort": "high", "summary": "auto"},
        text={"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}, "verbosity": "low"},
        chat_template_kwargs={"x": 1},
    )
    (request,) = service.requests
    assert (request.model, request.max_tokens, request.thinking.effort) == ("m", 100, "high")
    assert request.sampling == Sampling(temperature=0.5, top_p=0.9, top_k=7, seed=3) and request.seeded
    assert request.unset == {"min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"}
    assert request.grammar is not None and request.grammar.kind == "json_schema"
    assert request.prompts[0].template_kwargs == {"x": 1} and request.logprobs is None
    accepted(http, text={"format": {"type": "json_object"}})
    assert service.requests[-1].grammar == Grammar("json_schema", '{"type":"object"}')


def test_what_is_requested_is_echoed(http):
    tools = [F | {"description": "d", "strict": True}, C, N, {"type": "web_search"}]
    response = accepted(
        http,
        instructions="i",
        metadata={"a": "b"},
        tools=tools,
        tool_choice={"type": "function", "name": "f"},
        parallel_tool_calls=False,
        max_output_tokens=9,
        max_tool_calls=2,
        temperature=0.5,
        top_p=0.9,
        truncation="auto",
        user="u",
        safety_identifier="s",
        prompt_cache_key="k",
        reasoning={"effort": "low"},
        text={"verbosity": "low"},
        service_tier="flex",
    )
    check_response(response)
    assert response["model"] == "org/tiny" and response["service_tier"] == "default"
    assert response["tools"] == tools and response["tool_choice"] == {"type": "function", "name": "f"}
    assert response["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    for name, value in {
        "instructions": "i",
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "max_output_tokens": 9,
        "max_tool_calls": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "truncation": "auto",
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "reasoning": {"effort": "low", "summary": None},
    }.items():
        assert response[name] == value


@pytest.mark.parametrize(
    "name, value",
    [
        ("client_metadata", {"a": "b"}),
        ("stream_options", {"include_obfuscation": False}),
        ("include", ["web_search_call.results", "file_search_call.results"]),
        ("prompt_cache_retention", "24h"),
        ("context_management", [{"type": "compaction"}]),
        ("conversation", None),
        ("prompt", None),
        ("tools", None),
        ("top_p", 0),
        ("store", False),
    ],
)
def test_what_cannot_change_the_answer_is_accepted(http, name, value):
    accepted(http, **{name: value})


CHOICES: list[tuple[Any, str, str | None, set[str] | None]] = [
    (None, "auto", None, None),
    ("none", "none", None, None),
    ("required", "required", None, None),
    ({"type": "function", "name": "f"}, "required", "f", None),
    ({"type": "function", "name": "g"}, "required", "n__g", None),
    ({"type": "function", "function": {"name": "f"}}, "required", "f", None),
    ({"type": "custom", "name": "c"}, "required", "c", None),
    ({"type": "web_search_preview"}, "auto", None, None),
    ({"type": "mcp", "server_label": "wiki"}, "required", None, {"wiki__read_page", "wiki__list"}),
    ({"type": "mcp", "server_label": "wiki", "name": "list"}, "required", "wiki__list", None),
    (
        {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "function", "name": "f"}, {"type": "custom", "name": "c"}],
        },
        "auto",
        None,
        {"f", "c"},
    ),
    (
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "mcp", "server_label": "wiki"}]},
        "required",
        None,
        {"wiki__read_page", "wiki__list"},
    ),
    ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}, "none", None, set()),
]


@pytest.mark.parametrize("choice, mode, name, allowed", CHOICES)
def test_tool_choice(http, service, choice, mode, name, allowed):
    accepted(http, tools=[F, C, N, M], tool_choice=choice, parallel_tool_calls=False)
    use = service.requests[0].tools
    assert (use.choice, use.name, use.allowed) == (mode, name, None if allowed is None else frozenset(allowed))
    assert list(use.schemas) == ["f", "c", "n__g", "wiki__read_page", "wiki__list"] and not use.parallel
    assert use.input_grammars == (("c", Grammar("lark", 'start: "a"')),)
    assert use.schemas["c"]["required"] == ["input"]


HOSTED = [
    "web_search",
    "web_search_preview_2025_03_11",
    "file_search",
    "computer_use_preview",
    "code_interpreter",
    "image_generation",
    "local_shell",
    "tool_search",
]


def test_hosted_tools_are_left_out_and_that_is_said_once(serve, service, caplog):
    app = create_app(services(service), body_limit=100_000)
    with (
        caplog.at_level(logging.INFO),
        serve(app) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http,
    ):
        for _ in range(2):
            accepted(http, tools=[{"type": kind} for kind in HOSTED], tool_choice="auto")
    assert service.requests[0].tools is None
    told = [record.getMessage() for record in caplog.records if "models here do not see it" in record.getMessage()]
    assert len(told) == len(set(told)) and sum("The tool file_search runs" in line for line in told) == 1


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input", "required"),
    ({"input": 5}, "input", "string or a list"),
    ({"input": [5]}, "input[0]", "an object"),
    ({"input": [{"type": "nonsense"}]}, "input[0].type", "one of"),
    ({"input": [{"content": "hi"}]}, "input[0].type", "one of"),
    ({"input": [{"role": "robot", "content": "hi"}]}, "input[0].role", "one of user"),
    ({"input": [{"role": "user"}]}, "input[0].content", "string or a list"),
    ({"input": [{"role": "user", "content": 5}]}, "input[0].content", "string or a list"),
    ({"input": [{"role": "user", "content": ["x"]}]}, "input[0].content[0]", "a part"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text", "string"),
    ({"input": [{"role": "user", "content": [{"type": "x"}]}]}, "input[0].content[0].type", "Supported"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url", "URL"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
        "input[0].content[0].file_id",
        "stores no files",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
        "input[0].content[0].file_id",
        "not supported",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_url": "f"}]}]},
        "input[0].content[0].file_url",
        "not supported",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_data": "JVBERi0xLjQK/w=="}]}]},
        "input[0].content[0].file_data",
        "PDF",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
        "input[0].content[0].input_audio",
        "wav",
    ),
    (
        {"input": [{"role": "assistant", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content",
        "text",
    ),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id", "string"),
    ({"input": [{"type": "function_call", "call_id": "1", "arguments": "{}"}]}, "input[0].name", "string"),
    (
        {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": 5}]},
        "input[0].arguments",
        "string",
    ),
    ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input[0].output", "required"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id", "string"),
    ({"input": [{"type": "custom_tool_call", "call_id": "1", "name": "f"}]}, "input[0].input", "string"),
    ({"input": [{"type": "mcp_approval_response", "approval_request_id": "x"}]}, "input[0].approve", "true or false"),
    ({"instructions": 5}, "instructions", "string"),
    ({"model": 5}, "model", "string"),
    ({"temperature": 3}, "temperature", "at most 2"),
    ({"temperature": "1"}, "temperature", "number"),
    ({"top_p": 1.5}, "top_p", "at most 1"),
    ({"top_logprobs": 21}, "top_logprobs", "at most 20"),
    ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
    ({"max_output_tokens": 1.5}, "max_output_tokens", "integer"),
    ({"max_tool_calls": -1}, "max_tool_calls", "at least 0"),
    ({"stream": "yes"}, "stream", "true or false"),
    ({"store": 1}, "store", "true or false"),
    ({"background": True, "store": False}, "background", "needs store"),
    ({"truncation": "some"}, "truncation", "must be 'auto' or 'disabled'"),
    ({"include": "all"}, "include", "list"),
    ({"metadata": {"a": 1}}, "metadata.a", "string"),
    ({"metadata": {str(n): "" for n in range(17)}}, "metadata", "at most 16"),
    ({"metadata": {"a" * 65: ""}}, "metadata", "at most 64"),
    ({"reasoning": "high"}, "reasoning", "object"),
    ({"reasoning": {"effort": "extreme"}}, "reasoning.effort", "one of"),
    ({"text": "x"}, "text", "object"),
    ({"text": {"format": {"type": "xml"}}}, "text.format", "json_schema"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "required"),
    ({"text": {"format": {"type": "json_schema", "schema": 5}}}, "text.format.schema", "JSON schema"),
    ({"conversation": "conv_1"}, "conversation", "not supported"),
    ({"prompt": {"id": "p"}}, "prompt", "not supported"),
    ({"inputs": "x"}, "inputs", "Did you mean input"),
    ({"tools": {}}, "tools", "list"),
    ({"tools": [5]}, "tools[0]", "object"),
    ({"tools": [{"type": "nonsense"}]}, "tools[0].type", "nonsense"),
    ({"tools": [{"name": "f"}]}, "tools[0].type", "one of"),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "letters"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "letters"),
    ({"tools": [F | {"parameters": 5}]}, "tools[0].parameters", "JSON schema"),
    ({"tools": [F, F]}, "tools", "two functions named 'f'"),
    ({"tools": [C | {"format": {"type": "x"}}]}, "tools[0].format", "grammar"),
    ({"tools": [C | {"format": {"type": "grammar", "syntax": "x"}}]}, "tools[0].format.syntax", "lark"),
    (
        {"tools": [C | {"format": {"type": "grammar", "syntax": "lark", "definition": ""}}]},
        "tools[0].format.definition",
        "non-empty",
    ),
    ({"tools": [{"type": "namespace", "tools": []}]}, "tools[0].name", "string"),
    ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools", "list"),
    (
        {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}]},
        "tools[0].tools[0].type",
        "function or custom",
    ),
    (
        {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]},
        "tools[0].tools[0].name",
        "letters",
    ),
    ({"tools": [{"type": "mcp"}]}, "tools[0].server_label", "string"),
    (
        {"tools": [{"type": "mcp", "server_label": "x", "server_url": "http://x"}]},
        "tools[0].server_label",
        "server_url is not used",
    ),
    ({"tools": [M | {"allowed_tools": 5}]}, "tools[0].allowed_tools", "list"),
    ({"tools": [M | {"require_approval": 5}]}, "tools[0].require_approval", "always"),
    ({"tools": [M, M]}, "tools", "one server_label"),
    ({"tool_choice": "maybe"}, "tool_choice", "must be none"),
    ({"tool_choice": "required"}, "tool_choice", "no tools"),
    ({"tool_choice": {"type": "function", "name": "x"}, "tools": [F]}, "tool_choice", "not among"),
    ({"tool_choice": {"type": "custom", "name": "f"}, "tools": [F]}, "tool_choice", "not among"),
    ({"tool_choice": {"type": "mcp", "server_label": "x"}, "tools": [F]}, "tool_choice", "not among"),
    ({"tool_choice": {"type": "mcp", "server_label": "wiki", "name": "x"}, "tools": [M]}, "tool_choice", "not among"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "x", "tools": []}, "tools": [F]}, "tool_choice.mode", "auto"),
    ({"tool_choice": {"type": "allowed_tools", "tools": [5]}, "tools": [F]}, "tool_choice.tools[0]", "name a tool"),
    ({"input": [{"type": "additional_tools", "tools": [{"type": "x"}]}]}, "input[0].tools[0].type", "one of"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body, param, words", BAD, ids=[f"{case[1]}-{case[2]}" for case in BAD])
def test_wrong_input_is_refused_in_openais_shape(http, service, body, param, words, stream):
    response = http.post(PATH, json={"input": "hi", "stream": stream} | body)
    error = response.json()["error"]
    assert response.status_code == 400 and error.keys() == {"message", "type", "param", "code", "request_id"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param), error
    assert words in error["message"]
    assert not service.requests and not service.counted


@pytest.mark.parametrize("wanted", [RESPONSE, "resp_x", "../../etc/passwd", ""])
@pytest.mark.parametrize("route", ["", "/input_tokens"])
def test_an_unknown_previous_response(http, service, wanted, route):
    response = http.post(PATH + route, json={"input": "hi", "previous_response_id": wanted})
    error = response.json()["error"]
    assert response.status_code == 404 and not service.requests
    assert (error["code"], error["param"]) == ("previous_response_not_found", "previous_response_id")
