"""Messages of the assistant in Anthropic's shape, whole and streamed. Every event is held against the client's types.

Scripted service, real HTTP.
"""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import pytest

from millstream import errors
from millstream.api.app import create_app
from millstream.types import CallDelta, Delta, FinishReason
from support.anthropic_types import check_message, checked_events
from support.services import services

PATH = "/v1/messages"
BODY = {"model": "m", "max_tokens": 16, "messages": [{"role": "user", "content": "hi"}]}
STOP, LENGTH, CALLS = FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS
SEAL = services(None).seal
USAGE = {
    "input_tokens": 4,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 3,
    "output_tokens": 5,
    "output_tokens_details": {"thinking_tokens": 0},
}


def whole(http, **more: object) -> dict[str, Any]:
    response = http.post(PATH, json=BODY | more)
    assert response.status_code == 200 and response.headers["content-type"] == "application/json"
    check_message(response.json())
    return response.json()


def streamed(http, **more: object) -> list[dict[str, Any]]:
    response = http.post(PATH, json=BODY | more | {"stream": True})
    assert response.status_code == 200 and response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return checked_events(response.text)


def summed(http, **more: object) -> dict[str, Any]:
    """The message that the official client makes of a stream."""
    with (
        anthropic.Anthropic(base_url=str(http.base_url), api_key="-", max_retries=0) as client,
        client.messages.stream(**BODY | more) as stream,  # type: ignore[arg-type]
    ):
        return stream.get_final_message().to_dict()


def opened(message: dict[str, Any]) -> dict[str, Any]:
    """The message without what differs from one request to the next: its id, and the nonce of signatures. The client
    sets `stop_details`, which we do not send."""
    content = [
        block | {"signature": SEAL.open(block["signature"])} if block["type"] == "thinking" else block
        for block in message["content"]
    ]
    return {key: value for key, value in message.items() if key not in ("id", "stop_details")} | {"content": content}


def test_a_whole_message(http):
    message = whole(http)
    assert message.pop("id").startswith("msg_")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "text", "text": "Hello world"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": USAGE,
    }


def test_a_stream(http):
    first, *rest = streamed(http)
    message = first["message"]
    assert message["id"].startswith("msg_") and message["content"] == [] and message["stop_reason"] is None
    assert message["usage"]["input_tokens"] == 0, "the scripted prompt has no tokens before its end"
    assert rest == [
        {"type": "ping"},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hello"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": " world"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": USAGE},
        {"type": "message_stop"},
    ]


CALL = [
    (Delta(0, calls=(CallDelta(0, "call-1", "weather", '{"ci'),)),),
    (Delta(0, calls=(CallDelta(0, arguments='ty":"Bern"}'),)),),
]
SCRIPTS = {
    "text": [(Delta(0, "a"), Delta(0, "b")), (Delta(0, "c", finish_reason=STOP),)],
    "nothing": [(Delta(0, finish_reason=STOP),)],
    "thinking": [(Delta(0, reasoning="h"),), (Delta(0, reasoning="m"),), (Delta(0, "yes", finish_reason=STOP),)],
    "one delta": [(Delta(0, "yes", reasoning="hm", calls=(CallDelta(0, "c", "f", "{}"),), finish_reason=CALLS),)],
    "a call": [(Delta(0, "See: "),), *CALL, (Delta(0, finish_reason=CALLS),)],
    "text between calls": [
        *CALL,
        (Delta(0, "and "),),
        (Delta(0, calls=(CallDelta(1, "call-2", "now", ""),)), Delta(0, "then", finish_reason=CALLS)),
    ],
    "two calls": [
        (Delta(0, calls=(CallDelta(0, "c", "f", "{}"), CallDelta(1, "d", "g", '{"a":1}')), finish_reason=CALLS),)
    ],
    "reasoning again": [(Delta(0, reasoning="a"), Delta(0, "b"), Delta(0, reasoning="c", finish_reason=STOP))],
    "cut call": [
        (Delta(0, calls=(CallDelta(0, "c", "f", '{"a": [1, 2], "b": "hal'),)),),
        (Delta(0, finish_reason=LENGTH),),
    ],
    "void": [*CALL[:1], (Delta(0, '{"ci', calls=(CallDelta(0, void=True),)),), (Delta(0, "!", finish_reason=STOP),)],
    "void, in order": [
        *CALL[:1],
        (Delta(0, calls=(CallDelta(0, void=True),)), Delta(0, '{"ci!', finish_reason=STOP)),
    ],
    "void at once": [
        (Delta(0, '{"ci', calls=(CallDelta(0, "call-1", "weather"), CallDelta(0, void=True))),),
        (Delta(0, "!", finish_reason=STOP),),
    ],
    "stop sequence": [(Delta(0, "a", finish_reason=STOP, stop_string="END"),)],
}
TEXT = {
    "text": [{"type": "text", "text": "abc"}],
    "nothing": [],
    "thinking": [{"type": "thinking", "thinking": "hm", "signature": "hm"}, {"type": "text", "text": "yes"}],
    "one delta": [
        {"type": "thinking", "thinking": "hm", "signature": "hm"},
        {"type": "text", "text": "yes"},
        {"type": "tool_use", "id": "c", "name": "f", "input": {}},
    ],
    "a call": [
        {"type": "text", "text": "See: "},
        {"type": "tool_use", "id": "call-1", "name": "weather", "input": {"city": "Bern"}},
    ],
    "text between calls": [
        {"type": "tool_use", "id": "call-1", "name": "weather", "input": {"city": "Bern"}},
        {"type": "text", "text": "and "},
        {"type": "tool_use", "id": "call-2", "name": "now", "input": {}},
        {"type": "text", "text": "then"},
    ],
    "two calls": [
        {"type": "tool_use", "id": "c", "name": "f", "input": {}},
        {"type": "tool_use", "id": "d", "name": "g", "input": {"a": 1}},
    ],
    "reasoning again": [
        {"type": "thinking", "thinking": "a", "signature": "a"},
        {"type": "text", "text": "b"},
        {"type": "thinking", "thinking": "c", "signature": "c"},
    ],
    "cut call": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": [1, 2]}}],
    "void": [{"type": "text", "text": '{"ci!'}],
    "void, in order": [{"type": "text", "text": '{"ci!'}],
    "void at once": [{"type": "text", "text": '{"ci!'}],
    "stop sequence": [{"type": "text", "text": "a"}],
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_blocks_come_in_order_and_a_stream_adds_up_to_the_whole(http, service, name):
    service.steps = SCRIPTS[name]
    message = opened(whole(http))
    assert message["content"] == TEXT[name]
    streamed(http)
    assert opened(summed(http)) == message


def test_eager_tools_are_streamed_as_they_are_written(http, service):
    service.steps = [*CALL, (Delta(0, finish_reason=CALLS),)]
    tool: dict[str, object] = {"name": "weather"}
    for eager, expected in ((True, ['{"ci', 'ty":"Bern"}']), (False, ['{"city":"Bern"}'])):
        events = streamed(http, tools=[tool | {"eager_input_streaming": eager}])
        pieces = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
        assert pieces == expected
    service.steps = SCRIPTS["void"]
    events = streamed(http, tools=[tool | {"eager_input_streaming": True}])
    starts = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert starts == ["tool_use", "text"], "what was sent cannot be taken back; the text follows"


def test_a_call_without_arguments_has_an_object_in_a_stream_too(http, service):
    service.steps = [(Delta(0, calls=(CallDelta(0, "c", "now"),), finish_reason=CALLS),)]
    (delta,) = [event["delta"] for event in streamed(http) if event["type"] == "content_block_delta"]
    assert delta == {"type": "input_json_delta", "partial_json": "{}"}


def test_arguments_that_no_client_could_parse_are_left_out(http, service, caplog):
    nested = '{"a":' * 500 + "1" + "}" * 500
    service.steps = [(Delta(0, calls=(CallDelta(0, "c", "f", nested),), finish_reason=CALLS),)]
    assert whole(http)["content"][0]["input"] == {}
    assert "recursion" in caplog.text


def test_omitted_thinking_leaves_the_signature(http, service):
    service.steps = SCRIPTS["thinking"]
    omitted = {"thinking": {"type": "adaptive", "display": "omitted"}}
    for message in (whole(http, **omitted), summed(http, **omitted)):
        block = message["content"][0]
        assert block["thinking"] == "" and SEAL.open(block["signature"]) == "hm"
    kinds = [event["delta"]["type"] for event in streamed(http, **omitted) if event["type"] == "content_block_delta"]
    assert kinds == ["signature_delta", "text_delta"]


def test_no_tokens_at_all_fill_the_cache_only(http, service):
    for message in (whole(http, max_tokens=0), summed(http, max_tokens=0)):
        assert (message["content"], message["stop_reason"], message["usage"]["output_tokens"]) == ([], "max_tokens", 0)
    assert [request.max_tokens for request in service.requests] == [1, 1]


@pytest.mark.parametrize(
    "last, expected",
    [
        ({"finish_reason": STOP}, ("end_turn", None)),
        ({"finish_reason": LENGTH}, ("max_tokens", None)),
        ({"finish_reason": CALLS}, ("tool_use", None)),
        ({"finish_reason": FinishReason.CANCELLED}, ("end_turn", None)),
        ({"finish_reason": STOP, "stop_string": "\n"}, ("stop_sequence", "\n")),
    ],
)
def test_stop_reasons(http, service, last, expected):
    service.steps = [(Delta(0, "x"),), (Delta(0, **last),)]
    message = whole(http)
    assert (message["stop_reason"], message["stop_sequence"]) == expected
    (delta,) = [event["delta"] for event in streamed(http) if event["type"] == "message_delta"]
    assert (delta["stop_reason"], delta["stop_sequence"]) == expected


MARK = {"cache_control": {"type": "ephemeral"}}


@pytest.mark.parametrize(
    "more",
    [
        MARK,
        {"system": [{"type": "text", "text": "s", **MARK}]},
        {"tools": [{"name": "now", **MARK}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", **MARK}]}]},
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "r", **MARK}]}
                    ],
                }
            ]
        },
    ],
)
def test_what_is_marked_for_the_cache_counts_as_written(http, more):
    """The scripted prompt has 7 tokens, 3 of them cached; the last one is never cached."""
    usage = whole(http, **more)["usage"]
    assert usage == USAGE | {"input_tokens": 1, "cache_creation_input_tokens": 3}
    assert streamed(http, **more)[-2]["usage"] == usage


@pytest.mark.parametrize(
    "error, kind, words",
    [
        (errors.StepFailed("bang"), "api_error", "bang"),
        (errors.EngineGone("gone"), "api_error", "gone"),
        (errors.Overloaded("full"), "overloaded_error", "full"),
        (ValueError(), "api_error", "The server failed on this request."),
    ],
)
def test_an_error_inside_a_stream_is_its_last_event(http, service, error, kind, words):
    service.steps = [(Delta(0, "cut"),), error]
    *_, last = streamed(http)
    assert last.pop("request_id").startswith("req_")
    assert last == {"type": "error", "error": {"type": kind, "message": words}}
    with (
        anthropic.Anthropic(base_url=str(http.base_url), api_key="-", max_retries=0) as client,
        pytest.raises(anthropic.APIStatusError, match=words),
        client.messages.stream(**BODY) as stream,  # type: ignore[arg-type]
    ):
        stream.get_final_message()


def test_pings_keep_a_stream_open(serve, service):
    service.steps, service.ends = [], False
    app = create_app(services(service), body_limit=1000, ping_seconds=0.01)
    with (
        serve(app) as port,
        httpx.stream("POST", f"http://127.0.0.1:{port}{PATH}", json=BODY | {"stream": True}) as response,
    ):
        arriving = response.iter_text()
        text = next(arriving)
        assert text.startswith("event: message_start") and text.endswith('event: ping\ndata: {"type":"ping"}\n\n')
        assert next(arriving).startswith("event: ping")
        generation = service.generation()
        generation.push([Delta(0, finish_reason=STOP)])
        generation.push(None)
        assert "message_stop" in "".join(arriving)
