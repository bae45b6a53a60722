"""Output items and events of the Responses API, with a scripted service: every event is held against the SDK's types,
and the whole response against the stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from millstream import errors
from millstream.api.app import create_app
from millstream.types import CallDelta, Delta, TextLogprob
from support.responses import (
    CALLS,
    HELLO,
    LENGTH,
    STOP,
    Scripts,
    call,
    check_events,
    check_response,
    events_of,
    script,
)
from support.services import services

PATH = "/v1/responses"
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}
PATCH = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "regex", "definition": "a+"}}
FILES = {
    "type": "namespace",
    "name": "mcp__files",
    "description": "Files",
    "tools": [WEATHER | {"name": "read"}, PATCH],
}
TOOLS = [WEATHER, PATCH, FILES, {"type": "web_search"}]
HI = TextLogprob("hi", b"hi", -0.5, (("hi", b"hi", -0.5), ("\ufffd", b"\xf0", float("-inf"))))
HALF = TextLogprob("\ufffd", b"\xf0", -1.0)

SCRIPTS: dict[str, Any] = {
    "text": HELLO,
    "empty": script(),
    "awkward text": script(Delta(0, '"\\ \n\r\u2028 data: x\n\n é 🙂 \x00')),
    "reasoning": script(Delta(0, reasoning="hm"), Delta(0, reasoning="m", text="yes")),
    "cut off": script(Delta(0, "once upon"), end=LENGTH),
    "cut off in reasoning": script(Delta(0, reasoning="once"), end=LENGTH),
    "a call": script(
        Delta(0, reasoning="hm"), Delta(0, "let me see"), *call(0, "weather", '{"ci', 'ty":"Bern"}'), end=CALLS
    ),
    "text after a call": script(Delta(0, "one"), call(0, "weather", "{}"), Delta(0, "two"), end=CALLS),
    "two calls": script([*call(0, "weather", "{}"), *call(1, "weather", '{"city":1}')], end=CALLS),
    "a custom call": script(*call(0, "patch", '{"inp', 'ut": "a\\n\\u00', "e9\\ud83d", '\\ude42"}'), end=CALLS),
    "a custom call of another form": script(*call(0, "patch", '{"text": 1}'), end=CALLS),
    "in a namespace": script(
        *call(0, "mcp__files__read", "{}"), *call(1, "mcp__files__patch", '{"input":"aa"}'), end=CALLS
    ),
    "an unknown function": script(*call(0, "other", "{}"), end=CALLS),
    "a call that is none": script(
        call(0, "weather", '{"ci'), (Delta(0, calls=(CallDelta(0, void=True),)), Delta(0, "<call>"))
    ),
    "a cut call": script(*call(0, "weather", '{"ci'), end=LENGTH),
    "logprobs": script(Delta(0, "hi", (HI,)), Delta(0, logprobs=(HALF,)), Delta(0, "🙂", (HALF,))),
    "nothing at all": script(),
    "many tokens in one batch": script(
        [Delta(0, reasoning="a"), Delta(0, reasoning="b"), Delta(0, "c"), Delta(0, "d")]
    ),
}


@pytest.fixture(scope="module")
def service() -> Scripts:
    return Scripts()


@pytest.fixture(scope="module")
def http(service, serve_module) -> Iterator[httpx.Client]:
    app = create_app(services(service), body_limit=100_000)
    with serve_module(app) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        yield client


@pytest.fixture(autouse=True)
def fresh(service) -> None:
    service.reset()


def stream(http: httpx.Client, **body: object) -> list[dict[str, Any]]:
    response = http.post(PATH, json={"input": "hi", "stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events_of(response.content)


def comparable(item: dict[str, Any]) -> dict[str, Any]:
    """An item without what differs from response to response."""
    return {key: value for key, value in item.items() if key not in ("id", "encrypted_content")}


def accumulated(events: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The text of each item, from its deltas alone."""
    texts: dict[str, Any] = {}
    for event in events:
        if event["type"].endswith(".delta") and "summary" not in event["type"]:
            texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
    return texts


def text_of(item: dict[str, Any]) -> str:
    if "content" in item:
        return "".join(part["text"] for part in item["content"])
    return item.get("arguments", item.get("input", ""))


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("include", [[], ["reasoning.encrypted_content", "message.output_text.logprobs"]])
def test_events_have_the_sdks_types_and_build_the_whole_response(http, service, name, include):
    service.scripts = [SCRIPTS[name]]
    body = {"tools": TOOLS, "include": include, "top_logprobs": 2 if include else None}
    body["reasoning"] = {"summary": "auto"} if include else None
    events = stream(http, **body)
    check_events(events)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]["response"]
    check_response(last)
    assert events[-1]["type"] == f"response.{last['status']}"
    done = {event["item"]["id"]: event["item"] for event in events if event["type"] == "response.output_item.done"}
    opened = [event["item"]["id"] for event in events if event["type"] == "response.output_item.added"]
    assert list(done) == opened and all(done[item["id"]] == item for item in last["output"])
    texts = accumulated(events)
    assert all(texts.get(item["id"], "") == text_of(item) for item in last["output"])
    whole = http.post(PATH, json={"input": "hi", **body}).json()
    check_response(whole)
    assert whole["status"] == last["status"] and whole["usage"] == last["usage"]
    assert [comparable(item) for item in whole["output"]] == [comparable(item) for item in last["output"]]


def test_the_order_of_events(http, service):
    service.scripts = [script(Delta(0, reasoning="hm"), Delta(0, "hi"), *call(0, "weather", "{}"), end=CALLS)]
    names = [event["type"].removeprefix("response.") for event in stream(http, tools=TOOLS)]
    assert names == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]


def output(http: httpx.Client, **body: object) -> list[dict[str, Any]]:
    return http.post(PATH, json={"input": "hi", **body}).json()["output"]


def test_items_of_each_kind(http, service):
    service.scripts = [SCRIPTS["a call"]]
    reasoning, message, function = output(http, tools=TOOLS)
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}] and reasoning["id"].startswith("rs_")
    assert message["content"][0]["text"] == "let me see" and message["id"].startswith("msg_")
    assert function["id"].startswith("fc_") and function["call_id"] == "call_0"
    assert (function["name"], function["arguments"]) == ("weather", '{"city":"Bern"}')
    service.scripts = [SCRIPTS["a custom call"]]
    (custom,) = output(http, tools=TOOLS)
    assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "patch", "a\né🙂")
    service.scripts = [SCRIPTS["a custom call of another form"]]
    assert output(http, tools=TOOLS)[0]["input"] == '{"text": 1}'


def test_the_reasoning_is_its_summary_for_clients_that_ask(http, service):
    service.scripts = [SCRIPTS["reasoning"]]
    (reasoning, _) = output(http, reasoning={"summary": "auto"})
    assert reasoning["summary"] == [{"type": "summary_text", "text": "hmm"}]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hmm"}]
    names = [event["type"] for event in stream(http, reasoning={"summary": "auto"}) if "summary" in event["type"]]
    assert names == [
        "response.reasoning_summary_part.added",
        "response.reasoning_summary_text.delta",
        "response.reasoning_summary_text.delta",
        "response.reasoning_summary_text.done",
        "response.reasoning_summary_part.done",
    ]
    output(http, input=[reasoning, {"role": "assistant", "content": "a"}])
    assert service.messages[0]["reasoning_content"] == "hmm"  # once, not twice


def test_a_namespace_is_flattened_for_the_model_and_restored_for_the_client(http, service):
    service.scripts = [SCRIPTS["in a namespace"]]
    function, custom = output(http, tools=TOOLS)
    assert (function["namespace"], function["name"]) == ("mcp__files", "read")
    assert (custom["namespace"], custom["name"], custom["input"]) == ("mcp__files", "patch", "aa")
    use = service.requests[0].tools
    assert list(use.schemas) == ["weather", "patch", "mcp__files__read", "mcp__files__patch"]
    assert [(name, grammar.kind) for name, grammar in use.input_grammars] == [
        ("patch", "regex"),
        ("mcp__files__patch", "regex"),
    ]
    # sent back, the calls have the names that the model wrote
    output(http, tools=TOOLS, input=[function, custom])
    (message,) = service.messages
    assert [each["function"]["name"] for each in message["tool_calls"]] == ["mcp__files__read", "mcp__files__patch"]


def test_a_call_that_is_none_is_not_in_the_response(http, service):
    service.scripts = [SCRIPTS["a call that is none"]]
    events = stream(http, tools=TOOLS)
    (message,) = events[-1]["response"]["output"]
    assert message["content"][0]["text"] == "<call>"
    (void,) = [event["item"] for event in events if event.get("item", {}).get("type") == "function_call"][1:]
    assert void["status"] == "incomplete"


def test_what_is_cut_off_is_incomplete(http, service):
    service.scripts = [SCRIPTS["cut off"]]
    response = http.post(PATH, json={"input": "hi", "max_output_tokens": 5}).json()
    assert response["status"] == "incomplete" and response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete" and service.requests[0].max_tokens == 5


def test_usage(http, service):
    usage = http.post(PATH, json={"input": "hi"}).json()["usage"]
    assert usage == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 12,
    }


def test_logprobs_belong_to_the_text(http, service):
    service.scripts = [SCRIPTS["logprobs"]]
    (message,) = output(http, include=["message.output_text.logprobs"], top_logprobs=2)
    tokens = message["content"][0]["logprobs"]
    assert [token["bytes"] for token in tokens] == [[104, 105], [0xF0], [0xF0]]
    assert tokens[0]["top_logprobs"][1] == {"token": "\ufffd", "bytes": [0xF0], "logprob": -9999.0}
    assert service.requests[0].logprobs == 2


@pytest.mark.parametrize(
    "error, code",
    [
        (errors.StepFailed("the model failed"), "server_error"),
        (errors.ContextOverflow("too long"), "context_length_exceeded"),
        (errors.EngineBusy("full", active=1, waiting=1, retry_after=1), "rate_limit_exceeded"),
    ],
)
def test_a_failure_in_a_stream_is_its_last_event(http, service, error, code):
    service.scripts = [[(Delta(0, "so far"),), error]]
    events = stream(http)
    assert events[-1]["type"] == "response.failed"
    failed = events[-1]["response"]
    assert failed["status"] == "failed" and failed["error"] == {"code": code, "message": error.message}
    assert failed["output"][0]["content"][0]["text"] == "so far"
    if code != "context_length_exceeded":  # the SDK does not list it, but Codex reads it
        check_events(events)
    whole = http.post(PATH, json={"input": "hi"})
    assert whole.status_code == error.status and whole.json()["error"]["code"] == error.code


def test_a_bug_in_the_server_ends_the_stream_as_a_failure(http, service):
    service.scripts = [[(Delta(0, "so far"),), ZeroDivisionError("a bug")]]
    events = stream(http)
    assert events[-1]["type"] == "response.failed" and "a bug" not in str(events[-1])
    check_events(events)


def test_an_error_before_the_first_event_is_a_plain_one(http, service):
    service.limit = 1
    whole = http.post(PATH, json={"input": "too long"})
    assert whole.status_code == 400 and whole.json()["error"]["code"] == "context_length_exceeded"


def test_a_prompt_that_is_too_long_fails_in_the_stream_where_codex_reads_it(http, service):
    service.limit = 1
    events = stream(http, input="too long")
    assert [event["type"] for event in events] == ["response.created", "response.failed"]
    assert events[-1]["response"]["error"]["code"] == "context_length_exceeded"
    assert events[0]["response"]["error"] is None


def test_a_client_that_leaves_ends_its_generation(http, service):
    import threading

    service.gate = threading.Event()
    with http.stream("POST", PATH, json={"input": "hi", "stream": True}) as response:
        next(response.iter_raw())
        generation = service.generations.get(timeout=60)
    assert generation.cancelled.wait(10) and not generation.ended


def test_finish_reasons_of_deltas_do_not_matter_but_length(http, service):
    for reason in (STOP, CALLS):
        service.scripts = [script(Delta(0, "x"), end=reason)]
        assert http.post(PATH, json={"input": "hi"}).json()["status"] == "completed"
