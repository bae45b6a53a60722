"""MCP servers in the Responses API: listed, called by the server itself, approved by the client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from millstream.api.app import create_app
from millstream.types import CallDelta, Delta
from support.responses import (
    CALLS,
    HELLO,
    LENGTH,
    Scripts,
    Tools,
    call,
    check_events,
    check_response,
    events_of,
    script,
)
from support.services import services

PATH = "/v1/responses"
WIKI = {"type": "mcp", "server_label": "wiki", "require_approval": "never"}
F = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
READ = script(Delta(0, reasoning="hm"), *call(0, "wiki__read_page", '{"title"', ': "Mill"}'), end=CALLS)


@pytest.fixture(scope="module")
def tools() -> Tools:
    return Tools()


@pytest.fixture(scope="module")
def service() -> Scripts:
    return Scripts()


@pytest.fixture(autouse=True)
def fresh(service, tools) -> None:
    service.reset(READ, HELLO)
    tools.calls.clear()


@pytest.fixture(scope="module")
def http(service, tools, serve_module) -> Iterator[httpx.Client]:
    app = create_app(services(service, tool_servers=tools), body_limit=100_000)
    with serve_module(app) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        yield client


def respond(http: httpx.Client, **body: object) -> dict[str, Any]:
    response = http.post(PATH, json={"input": "hi", "tools": [WIKI], **body})
    assert response.status_code == 200, response.text
    check_response(response.json())
    return response.json()


def kinds(response: dict[str, Any]) -> list[str]:
    return [item["type"] for item in response["output"]]


def test_the_server_calls_and_the_model_answers(http, service, tools):
    response = respond(http)
    assert kinds(response) == ["mcp_list_tools", "reasoning", "mcp_call", "message"]
    listed, _, called, message = response["output"]
    assert [tool["name"] for tool in listed["tools"]] == ["read page", "list"]
    assert (called["server_label"], called["name"], called["arguments"]) == ("wiki", "read page", '{"title": "Mill"}')
    assert (called["output"], called["error"], called["status"]) == ("page Mill", None, "completed")
    assert message["content"][0]["text"] == "Hello world"
    assert tools.calls == [("wiki", "read page", {"title": "Mill"})]
    assert response["usage"]["output_tokens"] == 10  # of both answers
    function = {"name": "wiki__read_page", "arguments": '{"title": "Mill"}'}
    made = {"id": called["id"], "type": "function", "function": function}
    assert service.messages[1:] == [
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [made]},
        {"role": "tool", "content": "page Mill", "tool_call_id": called["id"]},
    ]


def test_the_events(http, service):
    service.scripts = [script(call(0, "wiki__read_page", "{}"), call(1, "wiki__list", "{}"), end=CALLS), HELLO]
    events = events_of(http.post(PATH, json={"input": "hi", "tools": [WIKI], "stream": True}).content)
    check_events(events)
    names = [event["type"].removeprefix("response.") for event in events if "output_text" not in event["type"]]
    assert names[2:-4] == [
        "output_item.added",
        "mcp_list_tools.in_progress",
        "mcp_list_tools.completed",
        "output_item.done",
        "output_item.added",
        "mcp_call.in_progress",
        "mcp_call_arguments.delta",
        "mcp_call_arguments.done",
        "output_item.added",
        "mcp_call.in_progress",
        "mcp_call_arguments.delta",
        "mcp_call_arguments.done",
        "mcp_call.completed",
        "output_item.done",
        "mcp_call.failed",
        "output_item.done",
        "output_item.added",
    ]
    check_response(events[-1]["response"])
    failed = events[-1]["response"]["output"][2]
    assert failed["status"] == "failed" and failed["output"] is None
    assert failed["error"]["content"][0]["text"] == "no list today"
    assert service.messages[-1]["content"] == "no list today"  # the model reads what went wrong


def test_rounds_stay_apart_in_the_history(http, service):
    """Two rounds with one call each are not one round with two calls: the prompt is that of the first time."""
    once = script(call(0, "wiki__read_page", "{}"), end=CALLS)
    service.scripts = [once, once, HELLO]
    response = respond(http)
    live = service.messages
    assert [message["role"] for message in live] == ["user", "assistant", "tool", "assistant", "tool"]
    service.scripts = [HELLO]
    second = respond(http, input="go on", previous_response_id=response["id"])
    assert service.messages[: len(live)] == live
    assert kinds(second) == ["message"]  # the tools were listed before
    third = respond(http, input=[{"role": "user", "content": "hi"}, *response["output"]])
    assert service.messages[: len(live)] == live and third["status"] == "completed"


def test_calls_for_the_client_end_the_response(http, service, tools):
    service.scripts = [script(call(0, "wiki__read_page", "{}"), call(1, "f", "{}"), end=CALLS)]
    response = respond(http, tools=[WIKI, F])
    assert kinds(response) == ["mcp_list_tools", "mcp_call", "function_call"]
    assert len(service.requests) == 1 and len(tools.calls) == 1
    service.scripts = [HELLO]
    output = {"type": "function_call_output", "call_id": "call_1", "output": "42"}
    respond(http, tools=[WIKI, F], input=[output], previous_response_id=response["id"])
    assert [message["role"] for message in service.messages] == ["user", "assistant", "tool", "tool"]
    assert len(service.messages[1]["tool_calls"]) == 2


def test_max_tool_calls(http, service, tools):
    endless = script([*call(0, "wiki__read_page", "{}"), *call(1, "wiki__read_page", "{}")], end=CALLS)
    service.scripts = [endless, HELLO]
    response = respond(http, max_tool_calls=1, tools=[WIKI, F])
    assert len(tools.calls) == 1
    assert [item["status"] for item in response["output"] if item["type"] == "mcp_call"] == ["completed", "failed"]
    assert service.requests[1].tools.allowed == {"f"}  # no further call is possible
    assert service.requests[1].tools.tools == service.requests[0].tools.tools  # but the prompt is the same


def test_a_required_call_is_required_once(http, service):
    respond(http, tool_choice="required")
    assert [request.tools.choice for request in service.requests] == ["required", "auto"]


def test_max_output_tokens_is_for_all_answers(http, service):
    respond(http, max_output_tokens=20)
    assert [request.max_tokens for request in service.requests] == [20, 15]


def test_allowed_tools(http, service):
    respond(http, tools=[WIKI | {"allowed_tools": ["list"]}])
    assert list(service.requests[0].tools.schemas) == ["wiki__list"]
    service.scripts = [HELLO]
    respond(http, tools=[WIKI | {"allowed_tools": {"tool_names": ["read page"]}}])
    assert list(service.requests[-1].tools.schemas) == ["wiki__read_page"]


def test_a_call_that_is_cut_off_is_not_run(http, service, tools):
    service.scripts = [script(*call(0, "wiki__read_page", '{"ti'), end=LENGTH)]
    events = events_of(http.post(PATH, json={"input": "hi", "tools": [WIKI], "stream": True}).content)
    check_events(events)
    assert not tools.calls and events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["output"][1]["status"] == "incomplete"


def test_a_call_that_is_none_is_not_run(http, service, tools):
    service.scripts = [
        script(call(0, "wiki__read_page", "{"), (Delta(0, calls=(CallDelta(0, void=True),)), Delta(0, "x")))
    ]
    events = events_of(http.post(PATH, json={"input": "hi", "tools": [WIKI], "stream": True}).content)
    check_events(events)
    assert not tools.calls and kinds(events[-1]["response"]) == ["mcp_list_tools", "message"]


def test_arguments_that_are_no_object(http, service, tools):
    service.scripts = [
        script(*call(0, "wiki__read_page", "{oops"), *call(1, "wiki__read_page", "[]"), end=CALLS),
        HELLO,
    ]
    response = respond(http)
    assert not tools.calls and [item["status"] for item in response["output"][1:3]] == ["failed", "failed"]


def test_a_server_that_does_not_start(http, service):
    response = http.post(PATH, json={"input": "hi", "tools": [WIKI | {"server_label": "broken"}]})
    assert response.status_code == 502 and response.json()["error"]["code"] == "tool_server_failed"
    assert not service.requests


ASKING = {"type": "mcp", "server_label": "wiki"}
READ_ONCE = script(*call(0, "wiki__read_page", '{"title": "Mill"}'), end=CALLS)


def ask(http: httpx.Client, service: Scripts) -> tuple[dict[str, Any], dict[str, Any]]:
    service.scripts = [READ_ONCE, HELLO]
    response = respond(http, tools=[ASKING])
    request = response["output"][-1]
    assert kinds(response) == ["mcp_list_tools", "mcp_approval_request"]
    assert (request["name"], request["arguments"]) == ("read page", '{"title": "Mill"}')
    return response, request


def test_approval(http, service, tools):
    response, request = ask(http, service)
    assert not tools.calls
    answer = {"type": "mcp_approval_response", "approval_request_id": request["id"], "approve": True}
    second = respond(http, tools=[ASKING], input=[answer], previous_response_id=response["id"])
    assert kinds(second) == ["mcp_call", "message"] and len(tools.calls) == 1
    assert second["output"][0]["approval_request_id"] == request["id"]
    assert [message["role"] for message in service.messages] == ["user", "assistant", "tool"]
    assert service.messages[1]["tool_calls"][0]["id"] == service.messages[2]["tool_call_id"] == request["id"]
    third = respond(http, tools=[ASKING], input="go on", previous_response_id=second["id"])
    assert kinds(third) == ["message"] and len(tools.calls) == 1  # it is not run again


def test_refusal(http, service, tools):
    response, request = ask(http, service)
    answer = {
        "type": "mcp_approval_response",
        "approval_request_id": request["id"],
        "approve": False,
        "reason": "secret",
    }
    second = respond(http, tools=[ASKING], input=[answer], previous_response_id=response["id"])
    assert kinds(second) == ["message"] and not tools.calls
    assert service.messages[-1]["content"] == "The user did not approve this call. secret"


def test_events_of_an_approval(http, service):
    service.scripts = [READ_ONCE]
    events = events_of(http.post(PATH, json={"input": "hi", "tools": [ASKING], "stream": True}).content)
    check_events(events)


@pytest.mark.parametrize(
    "rule, asked",
    [
        ("always", True),
        ("never", False),
        ({"never": {"tool_names": ["read page"]}}, False),
        ({"never": {"tool_names": ["list"]}}, True),
        ({"always": {"tool_names": ["list"]}}, False),
    ],
)
def test_who_needs_approval(http, service, tools, rule, asked):
    service.scripts = [READ_ONCE, HELLO]
    respond(http, tools=[ASKING | {"require_approval": rule}])
    assert bool(tools.calls) != asked


def test_an_approval_for_a_server_that_is_not_offered(http, service, tools):
    response, request = ask(http, service)
    answer = {"type": "mcp_approval_response", "approval_request_id": request["id"], "approve": True}
    body = {"input": [answer], "previous_response_id": response["id"]}
    refused = http.post(PATH, json=body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "tools" and not tools.calls
