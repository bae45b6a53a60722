"""API keys and CORS, over a socket."""

from __future__ import annotations

import asyncio
import socket

import httpx
import openai
import pytest

from millstream.api.app import create_app
from millstream.api.auth import ApiKeys
from millstream.errors import Unauthorized
from support.services import services

KEYS = ("first-key", "zweiter-schlüssel")
ORIGIN = "http://page.example"
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
URL = "/v1/chat/completions"
PREFLIGHT = {
    "origin": ORIGIN,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,x-stainless-lang",
}


@pytest.fixture(scope="module")
def _locked(open_client) -> httpx.Client:
    return open_client(body_limit=10_000, api_keys=KEYS)


@pytest.fixture
def locked(_locked, stage, service) -> httpx.Client:
    stage.service = service
    return _locked


@pytest.fixture(scope="module")
def _shared(open_client) -> httpx.Client:
    return open_client(body_limit=10_000, api_keys=KEYS, cors_origins=(ORIGIN,))


@pytest.fixture
def shared(_shared, stage, service) -> httpx.Client:
    """With keys, and with one origin that may call."""
    stage.service = service
    return _shared


def bearer(key: str) -> dict[bytes, bytes]:
    return {b"authorization": b"Bearer " + key.encode()}


@pytest.mark.parametrize(
    "headers",
    [
        bearer(KEYS[0]),
        bearer(KEYS[1]),
        {b"x-api-key": KEYS[0].encode()},
        {b"x-api-key": KEYS[1].encode()},
        {b"authorization": b"bearer   first-key"},
        bearer("made-up") | {b"x-api-key": KEYS[0].encode()},
        {b"authorization": b"Basic abc", b"x-api-key": KEYS[0].encode()},
    ],
)
def test_a_valid_key_is_accepted(locked, service, headers):
    assert locked.post(URL, json=CHAT, headers=headers).status_code == 200
    assert locked.get("/v1/models", headers=headers).status_code == 200
    assert len(service.requests) == 1


@pytest.mark.parametrize(
    "headers, words",
    [
        ({}, "the request has none"),
        ({b"authorization": b"Bearer"}, "no 'Bearer KEY'"),
        ({b"authorization": b"first-key"}, "no 'Bearer KEY'"),
        ({b"authorization": b"Basic first-key"}, "no 'Bearer KEY'"),
        ({b"x-api-key": b""}, "the request has none"),
        (bearer("sesame"), "is not valid"),
        (bearer("first-key2"), "is not valid"),
        (bearer("first-ke"), "is not valid"),
        (bearer("First-Key"), "is not valid"),
        ({b"x-api-key": b"sesame"}, "is not valid"),
        ({b"x-api-key": b"\xff\xfe"}, "is not valid"),
        ({b"x-api-key": "zweiter-schlüssel".encode("latin-1")}, "is not valid"),
        (bearer("Bearer first-key"), "is not valid"),
    ],
)
@pytest.mark.parametrize("path", [URL, "/v1/models", "/metrics", "/openapi.json", "/", "/healthy", "/nowhere"])
def test_anything_else_is_refused(locked, service, headers, words, path):
    response = locked.request("POST" if path == URL else "GET", path, headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("authentication_error", "invalid_api_key", None)
    assert words in error["message"] and "Authorization: Bearer KEY" in error["message"]
    assert "sesame" not in response.text
    assert service.requests == []


def test_health_is_always_open(locked):
    assert locked.get("/health").status_code == 200
    assert locked.get("/health", headers=bearer("wrong")).status_code == 200


def test_openais_client_raises_an_authentication_error(locked):
    url = f"{locked.base_url}/v1"
    with openai.OpenAI(base_url=url, api_key=KEYS[0], max_retries=0) as client:
        assert client.chat.completions.create(model="", **CHAT).choices[0].message.content == "Hello world"
    with (
        openai.OpenAI(base_url=url, api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError) as caught,
    ):
        client.models.list()
    assert caught.value.code == "invalid_api_key"


@pytest.mark.parametrize("expects", [False, True])
def test_no_body_is_read_before_the_key(locked, expects):
    """The response arrives before any byte of the announced body, even if the body is over the limit."""
    with (
        socket.create_connection(("127.0.0.1", locked.base_url.port), timeout=60) as line,
        line.makefile("rb") as reply,
    ):
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 900000\r\n"
        line.sendall(head + (b"expect: 100-continue\r\n" if expects else b"") + b"\r\n")
        assert reply.readline().split()[1] == b"401"
        headers = list(iter(reply.readline, b"\r\n"))
        assert (b"connection: close\r\n" in headers) == expects


def test_without_keys_the_server_is_open(http):
    assert http.get("/v1/models").status_code == 200
    assert http.get("/v1/models", headers=bearer("whatever")).status_code == 200


def test_scopes_other_than_http_are_refused_too():
    reached = []

    async def app(scope, receive, send):
        reached.append(scope["type"])

    async def nothing(*_):
        raise AssertionError

    guarded = ApiKeys(app, KEYS)
    asyncio.run(guarded({"type": "lifespan"}, nothing, nothing))
    with pytest.raises(Unauthorized):
        asyncio.run(guarded({"type": "websocket", "path": "/v1", "headers": []}, nothing, nothing))
    assert reached == ["lifespan"]


def test_a_preflight_needs_no_key(shared, locked):
    response = shared.options(URL, headers=PREFLIGHT)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == ORIGIN
    assert "POST" in response.headers["access-control-allow-methods"]
    assert response.headers["access-control-allow-headers"] == PREFLIGHT["access-control-request-headers"]
    assert "access-control-allow-credentials" not in response.headers
    # Without origins, the key alone decides: a page that has it may call from anywhere.
    plain = locked.options(URL, headers=PREFLIGHT)
    assert plain.status_code == 200 and plain.headers["access-control-allow-origin"] == "*"
    assert locked.options(URL).status_code == 401
    assert locked.options(URL, headers={"origin": ORIGIN}).status_code == 401


def test_other_origins_are_not_allowed(shared):
    elsewhere = {"origin": "http://elsewhere.example"}
    preflight = shared.options(URL, headers=PREFLIGHT | elsewhere)
    assert not [name for name in preflight.headers if name.startswith("access-control")]
    response = shared.get("/v1/models", headers=elsewhere | bearer(KEYS[0]))
    assert "access-control-allow-origin" not in response.headers


def test_an_allowed_public_page_reaches_a_private_server(shared):
    response = shared.options(URL, headers=PREFLIGHT | {"access-control-request-private-network": "true"})
    assert response.status_code == 200


def test_responses_and_errors_carry_the_cors_headers(shared, service):
    page = {"origin": ORIGIN}
    refused = shared.post(URL, json=CHAT, headers=page)
    assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer"
    right = page | {"x-api-key": KEYS[0]}
    large = shared.post(URL, content=b" " * 10_001, headers=right)
    assert large.status_code == 413
    streamed = shared.post(URL, json=CHAT | {"stream": True}, headers=right)
    assert streamed.status_code == 200 and streamed.text.endswith("data: [DONE]\n\n")
    service.start_error = ZeroDivisionError()
    failed = shared.post(URL, json=CHAT, headers=right)
    assert failed.status_code == 500
    for response in (refused, large, streamed, failed):
        assert response.headers["access-control-allow-origin"] == ORIGIN
        assert "access-control-allow-credentials" not in response.headers


def test_all_origins(serve, service):
    with serve(create_app(services(service), body_limit=1000, cors_origins=("*",))) as port:
        response = httpx.get(f"http://127.0.0.1:{port}/v1/models", headers={"origin": ORIGIN})
    assert response.status_code == 200 and response.headers["access-control-allow-origin"] == "*"


@pytest.fixture(scope="module")
def _open_server(open_client) -> httpx.Client:
    return open_client(body_limit=10_000, cors_origins=(ORIGIN,))


@pytest.fixture
def open_server(_open_server, stage, service) -> httpx.Client:
    """Without keys, and with one origin that may call."""
    stage.service = service
    return _open_server


def test_own_pages_allowed_pages_and_programs_may_call(open_server) -> None:
    own = str(open_server.base_url).rstrip("/")
    for headers in ({}, {"origin": own}, {"origin": own.upper()}, {"origin": ORIGIN}):
        assert open_server.post(URL, json=CHAT, headers=headers).status_code == 200, headers


def test_with_keys_the_key_decides(locked) -> None:
    response = locked.post(URL, json=CHAT, headers={"origin": "http://evil.example", "x-api-key": KEYS[0]})
    assert response.status_code == 200
