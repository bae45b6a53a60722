"""Errors have OpenAI's shape wherever they happen."""

from __future__ import annotations

import logging

import openai
import pytest

from millstream import errors
from millstream.api.errors import told, without_paths

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TEXT = {"prompt": "hi"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "error, status, kind, code, param",
    [
        (errors.BadRequest("no", param="x"), 400, "invalid_request_error", "invalid_request", "x"),
        (errors.ContextOverflow("long"), 400, "invalid_request_error", "context_length_exceeded", None),
        (errors.NotFound("none", param="model"), 404, "invalid_request_error", "model_not_found", "model"),
        (errors.EngineGone("gone"), 503, "server_error", "engine_unavailable", None),
        (errors.StepFailed("bang"), 500, "server_error", "engine_error", None),
        (errors.ModelError("odd"), 500, "server_error", "model_error", None),
    ],
)
def test_error_of_start_is_a_plain_http_error(http, service, stream, error, status, kind, code, param):
    service.start_error = error
    response = http.post("/v1/chat/completions", json=CHAT | {"stream": stream})
    assert response.status_code == status and response.headers["content-type"] == "application/json"
    body = {"message": error.message, "type": kind, "param": param, "code": code}
    assert response.json() == {"error": body | {"request_id": response.headers["x-request-id"]}}


COMMAND = 'the command "g++ -O3 "/tmp/mlx/0.1/cpu/a.cpp" -o "/tmp/my files/a.so"" failed: /usr/lib/x.so: full'
SHORT = 'the command "g++ -O3 "a.cpp" -o "a.so"" failed: x.so: full'
DIALECTS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": TEXT,
    "/v1/responses": {"input": "hi"},
    "/v1/messages": CHAT | {"max_tokens": 5, "model": "m"},
    "/api/chat": CHAT | {"model": "plain"},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", DIALECTS)
def test_no_dialect_tells_where_files_are_on_this_machine(http, service, path, stream, caplog):
    """Before the first byte and in the stream. The log has all of it."""
    service.start_error = errors.StepFailed(COMMAND)
    for _ in range(2):
        answer = http.post(path, json=DIALECTS[path] | {"stream": stream}).text.replace('\\"', '"')
        assert SHORT in answer and "/tmp" not in answer and "/usr" not in answer
        service.start_error = None
        service.steps = [*service.steps[:1], errors.StepFailed(COMMAND)]
    assert "/tmp/mlx/0.1/cpu" in caplog.text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("/home/a/model: no config.json", "model: no config.json"),
        ("[Errno 28] No space left on device: '/var/my cache/x.bin'", "[Errno 28] No space left on device: 'x.bin'"),
        ("POST /v1/models/a/load tries again.", "POST /v1/models/a/load tries again."),
        ("see https://host/usr/lib and a/usr/lib, 1/2 of it", "see https://host/usr/lib and a/usr/lib, 1/2 of it"),
        ("org/name and /nowhere-at-all/x", "org/name and /nowhere-at-all/x"),
    ],
)
def test_paths_of_this_machine_are_recognised(text: str, told: str) -> None:
    assert without_paths(text) == told


def test_what_a_client_sent_is_quoted_as_it_is() -> None:
    assert told(errors.BadRequest("not a folder: /usr/lib/x")) == "not a folder: /usr/lib/x"


def test_busy_says_when_to_retry(client, service, caplog):
    service.start_error = errors.EngineBusy("full", active=4, waiting=9, retry_after=3)
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model="m", **CHAT, stream=True)
    assert caught.value.status_code == 503 and caught.value.response.headers["retry-after"] == "3"
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    body = caught.value.body
    assert (body["active"], body["waiting"], body["code"]) == (4, 9, "engine_busy")


@pytest.mark.parametrize(
    "method, path, status, code, allow",
    [
        ("GET", "/nowhere", 404, "unknown_url", None),
        ("POST", "/v1/chat/completions/more", 404, "unknown_url", None),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed", "OPTIONS, POST"),
        ("PUT", "/v1/completions", 405, "method_not_allowed", "OPTIONS, POST"),
        ("POST", "/health", 405, "method_not_allowed", "GET, HEAD, OPTIONS"),
        ("DELETE", "/v1/models/a/b", 405, "method_not_allowed", "GET, HEAD, OPTIONS"),
        ("DELETE", "/v1/models/a/load", 405, "method_not_allowed", "OPTIONS, POST"),
    ],
)
def test_wrong_url_or_method(http, method, path, status, code, allow):
    response = http.request(method, path)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == (status, "invalid_request_error", code)
    assert path in error["message"]
    assert response.headers.get("allow") == allow


def test_anything_else_is_a_500_without_details(http, service, caplog):
    service.start_error = ZeroDivisionError("secret detail")
    response = http.post("/v1/completions", json=TEXT)
    assert response.status_code == 500
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert "secret" not in response.text
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert record.name == "millstream.api.edge" and record.exc_info and "/v1/completions" in record.getMessage()
    service.start_error = None
    assert http.post("/v1/completions", json=TEXT).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route, base", [("chat/completions", CHAT), ("completions", TEXT)])
@pytest.mark.parametrize("failure", [errors.StepFailed("the step failed"), KeyError("secret")])
def test_failure_during_the_generation(http, service, stream, route, base, failure):
    service.steps = [*service.steps[:1], failure]
    response = http.post(f"/v1/{route}", json=base | {"stream": stream})
    code = "engine_error" if isinstance(failure, errors.StepFailed) else "internal_error"
    assert service.generation().cancelled.is_set() and "secret" not in response.text
    if not stream:
        assert response.status_code == 500 and response.json()["error"]["code"] == code
        return
    assert response.status_code == 200
    *chunks, last, rest = response.text.split("\n\n")
    assert "Hello" in chunks[-1] and rest == ""
    assert last.startswith('data: {"error":{"message":') and f'"code":"{code}"' in last


def test_the_official_client_raises_in_the_stream(client, service):
    service.steps = [*service.steps[:1], errors.EngineGone("the engine died")]
    texts = []
    with pytest.raises(openai.APIError, match="the engine died") as caught:
        for chunk in client.chat.completions.create(model="m", **CHAT, stream=True):
            texts.append(chunk.choices[0].delta.content)
    assert texts == ["", "Hello"] and caught.value.code == "engine_unavailable"


def test_engine_failures_are_logged_without_a_trace(http, service, caplog):
    service.start_error = errors.EngineGone("the engine died")
    http.post("/v1/completions", json=TEXT)
    (record,) = [record for record in caplog.records if record.name.startswith("millstream.api")]
    assert record.levelno == logging.WARNING and "the engine died" in record.getMessage()
