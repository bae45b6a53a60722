"""Errors in Anthropic's shape: wrong input names its field and reaches no engine. Scripted service, real HTTP."""

from __future__ import annotations

import anthropic
import httpx
import pytest

from millstream import errors

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HI = [{"role": "user", "content": "hi"}]
BODY = {"max_tokens": 16, "messages": HI}
VERSION = {"anthropic-version": "2023-06-01"}


def user(*blocks: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def assistant(*blocks: object) -> dict[str, object]:
    return {"messages": [*HI, {"role": "assistant", "content": list(blocks)}, *HI]}


def image(**source: object) -> dict[str, object]:
    return {"type": "image", "source": source}


def document(**source: object) -> dict[str, object]:
    return {"type": "document", "source": source}


CALL = {"type": "tool_use", "id": "a", "name": "b", "input": {}}
FIRST = "messages[0].content[0]"
WRONG = [
    ({"max_tokens": None}, ["max_tokens is required"]),
    ({"max_tokens": -1}, ["max_tokens", "at least 0"]),
    ({"max_tokens": "16"}, ["max_tokens", "integer"]),
    ({"messages": None}, ["messages is required"]),
    ({"messages": []}, ["messages"]),
    ({"messages": "hi"}, ["messages", "list"]),
    ({"messages": ["hi"]}, ["messages[0]"]),
    ({"messages": [{"content": "hi"}]}, ["messages[0].role", "user"]),
    ({"messages": [{"role": "tool", "content": "hi"}]}, ["messages[0].role", "assistant"]),
    ({"messages": [{"role": []}]}, ["messages[0].role"]),
    ({"messages": [{"role": "user"}]}, ["messages[0].content"]),
    ({"messages": [{"role": "user", "content": 1}]}, ["messages[0].content"]),
    ({"messages": [*HI, {"role": "assistant", "content": [CALL]}]}, ["messages", "tool_result"]),
    ({"temperature": 2.5}, ["temperature", "at most 2"]),
    ({"temperature": True}, ["temperature", "number"]),
    ({"top_p": -0.1}, ["top_p"]),
    ({"top_k": 1.5}, ["top_k", "integer"]),
    ({"stop_sequences": {"a": 1}}, ["stop_sequences", "list"]),
    ({"stop_sequences": [5]}, ["stop_sequences[0]"]),
    ({"stop_sequences": ["x"] * 65}, ["stop_sequences", "64"]),
    ({"stream": "yes"}, ["stream", "true or false"]),
    ({"model": 7}, ["model", "string"]),
    ({"system": 7}, ["system"]),
    ({"system": [image(type="url", url="u")]}, ["system[0]", "text"]),
    ({"thinking": "on"}, ["thinking", "enabled"]),
    ({"thinking": {"type": "on"}}, ["thinking", "enabled"]),
    ({"thinking": {"type": "enabled", "budget_tokens": "9"}}, ["thinking.budget_tokens"]),
    ({"thinking": {"type": "enabled", "display": "all"}}, ["thinking.display", "omitted"]),
    ({"output_config": []}, ["output_config", "object"]),
    ({"output_config": {"effort": "huge"}}, ["output_config.effort", "xhigh"]),
    ({"output_config": {"format": {"type": "text"}}}, ["output_config.format", "json_schema"]),
    ({"output_config": {"format": {"type": "json_schema"}}}, ["output_config.format.schema"]),
    ({"output_format": {"type": "json_schema", "schema": 7}}, ["output_format.schema"]),
    ({"mcp_servers": [{"type": "url", "url": "u", "name": "n"}]}, ["mcp_servers"]),
    ({"container": "c"}, ["container"]),
    ({"max_token": 1}, ["max_token ", "max_tokens"]),
    (user("hi"), [FIRST]),
    (user({"text": "hi"}), [FIRST, "type"]),
    (user({"type": "text"}), [f"{FIRST}.text", "string"]),
    (user({"type": "video", "source": {}}), [FIRST, "'video'"]),
    (user({"type": "tool_use", "id": "a", "name": "b", "input": {}}), [FIRST, "assistant"]),
    (user({"type": "tool_result"}), [f"{FIRST}.tool_use_id"]),
    (user({"type": "tool_result", "tool_use_id": "a", "content": 7}), [f"{FIRST}.content"]),
    (user({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "x"}]}), [f"{FIRST}.content[0]", "'x'"]),
    (user(image(type="base64", media_type="text/html", data="AAAA")), [f"{FIRST}.source", "image/png"]),
    (user(image(type="file", file_id="f")), [f"{FIRST}.source", "files"]),
    (user({"type": "image"}), [f"{FIRST}.source"]),
    (user(document(type="base64", media_type="application/pdf", data="A")), [f"{FIRST}.source", "PDFs are not"]),
    (user(document(type="url", url="https://x.example/a.pdf")), [f"{FIRST}.source", "PDFs are not"]),
    (user(document(type="file", file_id="f")), [f"{FIRST}.source", "files"]),
    (user(document(type="text")), [f"{FIRST}.source"]),
    (user(document(type="content", content=[image(type="url", url="u")])), [f"{FIRST}.source.content[0]", "text"]),
    (user({"type": "document", "title": 7, "source": {"type": "text", "data": "d"}}), [f"{FIRST}.title"]),
    (user({"type": "search_result", "content": "x"}), [f"{FIRST}.content"]),
    (user({"type": "tool_reference"}), [f"{FIRST}.tool_name"]),
    (assistant({"type": "tool_use", "name": "b"}), ["messages[1].content[0].id"]),
    (assistant({"type": "tool_use", "id": "a", "name": "b", "input": "{}"}), ["messages[1].content[0].input"]),
    (assistant({"type": "tool_result", "tool_use_id": "a"}), ["messages[1].content[0]", "user"]),
    (assistant({"type": "thinking", "thinking": 7}), ["messages[1].content[0].thinking"]),
    (assistant({"type": "redacted_thinking"}), ["messages[1].content[0].data"]),
]


@pytest.mark.parametrize("more, words", WRONG, ids=[words[0] + str(number) for number, (_, words) in enumerate(WRONG)])
def test_wrong_input(http, service, more, words):
    for stream in (False, True):
        response = http.post(PATH, json={"stream": stream} | BODY | more)
        body = response.json()
        assert response.status_code == 400 and response.headers["content-type"] == "application/json"
        assert body.keys() == {"type", "error", "request_id"} and body["type"] == "error"
        assert body["error"].keys() == {"type", "message"} and body["error"]["type"] == "invalid_request_error"
        assert all(word in body["error"]["message"] for word in words), body["error"]["message"]
    assert not service.requests


ODD = [None, True, 0, -1, 1.5, 10**30, "", "x", [], [None], [[]], {}, {"type": []}, {"type": "text"}, [{"type": "x"}]]
FIELDS = [
    *(
        "model",
        "messages",
        "system",
        "tools",
        "tool_choice",
        "thinking",
        "output_config",
        "output_format",
        "max_tokens",
    ),
    *("temperature", "top_p", "top_k", "stop_sequences", "stream", "metadata", "mcp_servers", "cache_control", "betas"),
]


@pytest.mark.parametrize("field", FIELDS)
def test_odd_values_are_served_or_refused(http, field):
    for value in ODD:
        for path in (PATH, COUNT):
            assert http.post(path, json=BODY | {field: value}).status_code in (200, 400), (field, value)


def test_odd_blocks_are_served_or_refused(http):
    for value in ODD:
        inner = user({"type": "tool_result", "tool_use_id": "a", "content": value, "is_error": value})
        assert http.post(PATH, json=BODY | inner).status_code in (200, 400), value
        for kind in ("text", "image", "document", "search_result", "tool_use", "thinking", "web_search_tool_result"):
            block = {"type": kind, "text": value, "source": value, "content": value, "input": value, "name": value}
            assert http.post(PATH, json=BODY | assistant(block)).status_code in (200, 400), (kind, value)


def test_counting_needs_no_limit_and_refuses_the_same(http, service):
    assert http.post(COUNT, json={"messages": HI}).status_code == 200
    begun = [*HI, {"role": "assistant", "content": [CALL]}]
    assert http.post(COUNT, json={"messages": begun}).status_code == 200, "agents count parts of conversations"
    service.requests.clear()
    for more in ({"messages": []}, {"tools": 5}, {"thinking": 7}):
        response = http.post(COUNT, json={"messages": HI} | more)
        assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request_error"
    assert not service.requests


BUSY = errors.EngineBusy("full", active=4, waiting=9, retry_after=3)


@pytest.mark.parametrize(
    "error, status, kind, raised",
    [
        (errors.BadRequest("no"), 400, "invalid_request_error", anthropic.BadRequestError),
        (errors.NotFound("none"), 404, "not_found_error", anthropic.NotFoundError),
        (errors.LoadCancelled("gone"), 409, "invalid_request_error", anthropic.ConflictError),
        (BUSY, 529, "overloaded_error", anthropic.InternalServerError),
        (errors.Overloaded("full"), 529, "overloaded_error", anthropic.InternalServerError),
        (errors.EngineGone("gone"), 503, "api_error", anthropic.InternalServerError),
        (errors.StepFailed("bang"), 500, "api_error", anthropic.InternalServerError),
        (errors.InsufficientMemory("big"), 507, "api_error", anthropic.InternalServerError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_of_the_service(http, service, error, status, kind, raised, stream):
    service.start_error = error
    response = http.post(PATH, json=BODY | {"stream": stream})
    assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
    assert response.headers.get("retry-after") == (None if error.retry_after is None else str(error.retry_after))
    with (
        anthropic.Anthropic(base_url=str(http.base_url), api_key="-", max_retries=0) as client,
        pytest.raises(raised, match=error.message) as caught,
    ):
        client.messages.create(model="m", max_tokens=1, messages=HI, stream=stream)
    assert caught.value.status_code == status and caught.value.body["error"]["type"] == kind


def test_a_prompt_that_is_too_long_is_said_in_words_that_agents_know(http, service):
    service.start_error = errors.ContextOverflow("This is too long.", tokens=9000, limit=8192)
    for path in (PATH, COUNT):
        body = BODY if path == PATH else {"messages": HI}
        error = http.post(path, json=body).json()["error"]
        assert error == {"type": "invalid_request_error", "message": "prompt is too long: 9000 tokens > 8191 maximum"}
    service.start_error = errors.ContextOverflow("Shorten it.")
    assert http.post(PATH, json=BODY).json()["error"]["message"] == "prompt is too long: Shorten it."


def test_errors_outside_the_routes(http, open_client):
    def kind(response: httpx.Response) -> tuple[int, str]:
        return response.status_code, response.json()["error"]["type"]

    assert kind(http.get(PATH)) == (405, "invalid_request_error")
    assert kind(http.post(f"{PATH}/batches", json={})) == (404, "not_found_error")
    assert kind(http.get("/v1/organizations", headers=VERSION)) == (404, "not_found_error")
    assert kind(http.post(PATH, content=b"{")) == (400, "invalid_request_error")
    keyed = open_client(body_limit=100, api_keys=("a-key",))
    assert kind(keyed.post(PATH, json=BODY)) == (401, "authentication_error")
    assert kind(keyed.get("/v1/models", headers=VERSION)) == (401, "authentication_error")
    large = keyed.post(PATH, json=BODY | {"system": "x" * 100}, headers={"x-api-key": "a-key"})
    assert kind(large) == (413, "request_too_large")
    assert keyed.get("/v1/models", headers=VERSION | {"x-api-key": "a-key"}).status_code == 200
    other = open_client(body_limit=100, hosts=("mill.example",))
    assert kind(other.post(PATH, json=BODY, headers={"host": "evil.example"})) == (403, "permission_error")


def test_errors_carry_the_id_of_their_request(http, service):
    service.steps = [errors.StepFailed("bang")]
    headers = {"x-request-id": "req_1"}
    for response in (
        http.post(PATH, json={}, headers=headers),
        http.get(f"{PATH}/none", headers=headers),
        http.post(PATH, json=BODY, headers=headers),
    ):
        assert response.json()["request_id"] == response.headers["request-id"] == "req_1"
    assert '"request_id":"req_1"' in http.post(PATH, json=BODY | {"stream": True}, headers=headers).text
