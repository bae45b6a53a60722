"""Requests that real clients sent, replayed: each gets a well-formed answer of its dialect.

`recorded/README.md` says where they come from. Answers are held against the official SDKs' own types.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic.types
import httpx
import ollama
import openai.types.chat
import openai.types.responses
import pytest
from pydantic import TypeAdapter

from support.recordings import load

RECORDED = load()
Body = dict[str, Any]

_CHAT = TypeAdapter(openai.types.chat.ChatCompletion)
_CHUNK = TypeAdapter(openai.types.chat.ChatCompletionChunk)
_RESPONSE = TypeAdapter(openai.types.responses.Response)
_RESPONSE_EVENT: TypeAdapter[Any] = TypeAdapter(openai.types.responses.ResponseStreamEvent)
_MESSAGE = TypeAdapter(anthropic.types.Message)
_MESSAGE_EVENT: TypeAdapter[Any] = TypeAdapter(anthropic.types.RawMessageStreamEvent)


@pytest.mark.parametrize("client", RECORDED)
def test_every_request_of_a_client_is_served(client: str, http: httpx.Client) -> None:
    items: list[str] = []
    for request in RECORDED[client]:
        body = _for_this_server(request["body"], items)
        answer = http.request(request["method"], request["path"], headers=request["headers"], json=body)
        path = request["path"].split("?")[0]
        if path in _NOT_SERVED:
            assert answer.status_code == 404
            continue
        assert answer.status_code == 200, f"{request['method']} {request['path']}: {answer.text}"
        if request["method"] != "HEAD":
            items += _ANSWERS[path](answer, body or {})


def test_recordings_carry_no_traces_of_a_machine_and_no_long_texts() -> None:
    for client, requests in RECORDED.items():
        for text in _strings(requests):
            assert not any(trace in text for trace in ("/tmp/", "/root/", "/home/", "/Users/", "aarch64")), client
            assert len(text) <= 210, f"{client}: {text}"


def _chat(answer: httpx.Response, body: Body) -> list[str]:
    if not body.get("stream"):
        assert _CHAT.validate_python(answer.json(), strict=True).choices[0].finish_reason == "stop"
        return []
    *events, done = _data(answer)
    chunks = [_CHUNK.validate_json(event) for event in events]
    assert done == "[DONE]"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello world"
    assert any(chunk.usage for chunk in chunks) == bool((body.get("stream_options") or {}).get("include_usage"))
    return []


def _responses(answer: httpx.Response, body: Body) -> list[str]:
    if body.get("stream"):
        events = [_RESPONSE_EVENT.validate_json(event) for event in _data(answer) if event != "[DONE]"]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[0].type == "response.created"
        assert events[-1].type == "response.completed"
        response = events[-1].response
    else:
        response = _RESPONSE.validate_python(answer.json())
    assert response.status == "completed"
    assert response.output_text == "Hello world"
    return [item.id for item in response.output]


def _messages(answer: httpx.Response, body: Body) -> list[str]:
    if not body.get("stream"):
        message = _MESSAGE.validate_python(answer.json())
        assert [block.text for block in message.content if block.type == "text"] == ["Hello world"]
        return []
    events = [_MESSAGE_EVENT.validate_json(event) for event in _data(answer) if json.loads(event)["type"] != "ping"]
    assert events[0].type == "message_start"
    assert events[-2].delta.stop_reason == "end_turn"
    assert events[-1].type == "message_stop"
    return []


def _message_tokens(answer: httpx.Response, body: Body) -> list[str]:
    assert answer.json()["input_tokens"] > 0
    return []


def _models(answer: httpx.Response, body: Body) -> list[str]:
    """The only recorded client that lists models speaks Anthropic's dialect."""
    assert [model["type"] for model in answer.json()["data"]] == ["model", "model"]
    return []


def _ollama(kind: type[ollama.ChatResponse] | type[ollama.GenerateResponse]) -> Callable[..., list[str]]:
    def check(answer: httpx.Response, body: Body) -> list[str]:
        lines = answer.text.splitlines()
        assert len(lines) == 1 or body.get("stream", True)
        parts = [kind.model_validate_json(line) for line in lines]
        assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
        return []

    return check


def _parsed_by(kind: type[ollama.ListResponse] | type[ollama.ShowResponse] | type[ollama.ProcessResponse]) -> Any:
    def check(answer: httpx.Response, body: Body) -> list[str]:
        kind.model_validate(answer.json())
        return []

    return check


_ANSWERS: dict[str, Callable[[httpx.Response, Body], list[str]]] = {
    "/v1/chat/completions": _chat,
    "/v1/responses": _responses,
    "/v1/messages": _messages,
    "/v1/messages/count_tokens": _message_tokens,
    "/v1/models": _models,
    "/api/chat": _ollama(ollama.ChatResponse),
    "/api/generate": _ollama(ollama.GenerateResponse),
    "/api/tags": _parsed_by(ollama.ListResponse),
    "/api/show": _parsed_by(ollama.ShowResponse),
    "/api/ps": _parsed_by(ollama.ProcessResponse),
}
_NOT_SERVED = ("/api/chat/api/show",)
"""LiteLLM asks for this by mistake, and goes on without it."""


def _data(answer: httpx.Response) -> list[str]:
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]


def _for_this_server(body: Body | None, items: list[str]) -> Body | None:
    """The body with our model, and with our items where it refers to those of answers that the client once got."""
    if body is None:
        return None
    body = copy.deepcopy(body)
    body |= {field: "org/tiny" for field in ("model", "name") if field in body}
    for item in body.get("input", []):
        if isinstance(item, dict) and item.get("type") == "item_reference":
            item["id"] = items[-1]
    return body


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        for inner in value:
            yield from _strings(inner)
    elif isinstance(value, str):
        yield value
