"""Paths that clients get slightly wrong, hints about URLs that are not served, and request ids."""

from __future__ import annotations

import asyncio
import logging
import socket

import httpx
import openai
import pytest

from millstream.api.app import create_app
from millstream.api.known_urls import hint
from millstream.api.paths import normal_path
from millstream.errors import EngineGone
from support.services import services

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    "path",
    ["/chat/completions", "/v1/chat/completions/", "//v1/chat/completions", "/v1//chat//completions//",
     "//chat/completions/", "/chat/completions?api-version=1"],
)  # fmt: skip
def test_a_chat_at_a_slightly_wrong_path_is_served(port, service, path):
    with socket.create_connection(("127.0.0.1", port)) as link:  # a client library would change some of the paths
        body = b'{"messages": [{"role": "user", "content": "hi"}]}'
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        link.sendall(head.encode() + body)
        answer = link.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 200") and b"Hello world" in answer
    assert len(service.requests) == 1


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize(
    "path", ["/models", "/models/", "/models/org/tiny", "/v1/models/org/tiny/", "/health/", "/docs/"]
)
def test_get_and_head_alike(http, path, method):
    assert http.request(method, path).status_code == 200


def test_the_client_of_openai_without_v1(port, service):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/", api_key="-", max_retries=0) as client:
        assert client.chat.completions.create(model="m", messages=CHAT["messages"]).choices[0].message.content


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        (b"/", b"/"),
        (b"//", b"/"),
        (b"*", b"*"),
        (b"/v1/models/a%2F%2Fb%2F", b"/v1/models/a%2F%2Fb%2F"),
        (b"/models/a%2Fb/load/", b"/v1/models/a%2Fb/load"),
        (b"/modelsx", b"/modelsx"),
        (b"/v1/v1/models", b"/v1/v1/models"),
        (b"/api/chat/", b"/api/chat"),
    ],
)
def test_normal_paths(raw, path):
    assert normal_path(raw) == path
    assert normal_path(path) == path


@pytest.mark.parametrize(
    "path", ["/models/org/tiny/load", "//v1/models/org/tiny/load", "/v1/models/org/tiny/load/", "/v1/models/tiny//load"]
)
def test_no_path_leads_around_the_admin_check_or_the_key(service, path):
    def post(app, **headers):
        async def main():
            transport = httpx.ASGITransport(app, client=("192.168.1.9", 5))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
                return await http.post(httpx.URL("http://localhost").copy_with(raw_path=path.encode()), headers=headers)

        return asyncio.run(main())

    assert post(create_app(services(service), body_limit=1000)).status_code == 403
    assert post(create_app(services(service), body_limit=1000, api_keys=("k",))).status_code == 401


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/v1/chat/completions", ["Did you mean /v1/chat/completions?", "only once"]),
        ("/v1/chat/completion", ["Use /v1/chat/completions"]),
        ("/v1/chat/compeltions", ["Did you mean /v1/chat/completions?"]),
        ("/v1/completion", ["Did you mean /v1/completions?"]),
        ("/completion", ["Use /v1/completions"]),
        ("/v1/audio/transcription", ["Did you mean /v1/audio/transcriptions?"]),
        ("/v1/images/generations", ["images"]),
        ("/v1/assistants", ["assistants", "Use /v1/"]),
        ("/tokenize", ["tokenisation"]),
        ("/slots", ["Use /metrics"]),
        ("/props", ["Use /v1/models"]),
        ("/api/v0/models", ["LM Studio", "Use /v1/models"]),
        ("/v1/nothing/of/the/kind", ["listed at /docs"]),
    ],
)
def test_a_404_says_what_is_served_instead(http, path, words):
    response = http.post(path, json={})
    error = response.json()["error"]
    message = error if isinstance(error, str) else error["message"]  # below /api it is Ollama's shape
    assert response.status_code == 404 and (error is message or error["code"] == "unknown_url")
    assert all(word in message for word in [path, *words, "/docs"])


def test_hints_name_only_what_is_served():
    assert "/v1/responses" in hint("/v1/threads/x", {"/v1/responses", "/v1/chat/completions"})
    assert "/v1/chat/completions" in hint("/v1/threads/x", {"/v1/chat/completions"})
    assert "Use" not in hint("/v1/threads/x", set())
    assert hint("/" + "x" * 100_000, {"/v1/models"}) == ""


ID_HEADERS = ("x-request-id", "request-id")


def ids(response):
    return [response.headers[name] for name in ID_HEADERS]


def test_every_response_has_a_request_id(http):
    stream = http.post("/v1/chat/completions", json=CHAT | {"stream": True})
    responses = [stream, http.get("/health"), http.head("/"), http.get("/nowhere"), http.options("/v1/models")]
    responses += [http.post("/v1/chat/completions", json={}), http.post("/health")]
    responses += [http.get("/", headers={"origin": "null"})]
    seen = set()
    for response in responses:
        first, second = ids(response)
        assert first == second and first.startswith("req_") and len(first) == 20
        seen.add(first)
    assert len(seen) == len(responses)


def test_a_refusal_before_the_application_has_one_too(port):
    with socket.create_connection(("127.0.0.1", port)) as link:
        link.sendall(b"nonsense\r\n\r\n")
        answer = link.makefile("rb").read()
    assert b"\r\nx-request-id: req_" in answer and b"\r\nrequest-id: req_" in answer


@pytest.mark.parametrize("sent", ["abc-123", "x" * 128, "0/9:~!"])
def test_the_id_of_the_client_is_kept(http, sent):
    assert ids(http.get("/health", headers={"x-request-id": sent})) == [sent, sent]


@pytest.mark.parametrize("sent", ["", "x" * 129, "a b", "é", "\x01"])
def test_an_id_that_is_not_sane_is_replaced(http, sent):
    headers = {b"x-request-id": sent.encode("latin-1")}
    if sent == "\x01":
        headers = [(b"x-request-id", b"a"), (b"x-request-id", b"b")]
    assert all(each.startswith("req_") for each in ids(http.get("/health", headers=headers)))


def test_the_log_of_a_failure_names_the_request(http, service, caplog):
    service.start_error = EngineGone("gone")
    with caplog.at_level(logging.WARNING):
        response = http.post("/v1/chat/completions", json=CHAT)
    assert response.headers["x-request-id"] in caplog.text
    with openai.OpenAI(base_url=str(http.base_url.join("/v1")), api_key="-", max_retries=0) as client:
        service.start_error = None
        assert client.chat.completions.create(model="m", messages=CHAT["messages"])._request_id.startswith("req_")
