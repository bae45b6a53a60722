"""Web pages and desktop apps: which origins may call a server without keys, and what the others can read."""

from __future__ import annotations

import logging

import httpx
import pytest

from millstream.api.origin import LOGGED_ORIGINS, OriginPolicy

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
URL = "/v1/chat/completions"
SITE = "https://site.example"
ASKED = "authorization, x-api-key, anthropic-version, anthropic-beta, content-type"

APPS = [
    "app://obsidian.md",
    "app://-",
    "tauri://localhost",
    "http://tauri.localhost",
    "https://tauri.localhost",
    "vscode-webview://1vh4o0a8r",
    "vscode-file://vscode-app",
    "capacitor://localhost",
    "ionic://localhost",
    "file://",
]
STRANGERS = [
    "null",
    "NULL",
    "",
    SITE,
    "http://site.example:8000",
    "http://localhost:3000",
    "http://127.0.0.1:3000",
    "http://localhost",
    "https://app",
    "http://app.site.example",
    "http://tauri.localhost:1420",
    "http://tauri.localhost.site.example",
    "app",
    "app:",
    "xapp://x",
    "chrome-extension://abcdefgh",
    "moz-extension://abcdefgh",
    "data:",
    "blob:http://localhost:3000",
    "http://[",
    "http://",
]
LOOPBACK = [
    "http://localhost:3000",
    "https://localhost",
    "http://127.0.0.1:5173",
    "http://[::1]:80",
    "http://a.localhost",
]


def preflight(client: httpx.Client, origin: str, method: str = "POST", **more: str) -> httpx.Response:
    headers = {"origin": origin, "access-control-request-method": method, "access-control-request-headers": ASKED}
    return client.options(URL, headers=headers | more)


@pytest.mark.parametrize("origin", APPS)
def test_apps_may_call_and_read(http, origin):
    asked = preflight(http, origin, **{"access-control-request-private-network": "true"})
    assert asked.status_code == 200 and "POST" in asked.headers["access-control-allow-methods"]
    assert asked.headers["access-control-allow-headers"] == ASKED
    assert asked.headers["access-control-allow-private-network"] == "true"
    sent = http.post(URL, json=CHAT | {"stream": True}, headers={"origin": origin})
    listed = http.get("/v1/models", headers={"origin": origin})
    failed = http.post(URL, json={}, headers={"origin": origin})
    assert (sent.status_code, listed.status_code, failed.status_code) == (200, 200, 400)
    for response in (asked, sent, listed, failed):
        assert response.headers["access-control-allow-origin"] == origin
        assert "Origin" in response.headers["vary"]
        assert "x-request-id" in response.headers["access-control-expose-headers"]
        assert "access-control-allow-credentials" not in response.headers


@pytest.mark.parametrize("origin", STRANGERS)
def test_pages_of_others_are_refused_and_can_read_why(http, service, origin):
    asked = preflight(http, origin, **{"access-control-request-private-network": "true"})
    assert asked.status_code == 200 and asked.headers["access-control-allow-origin"] == origin
    assert asked.headers["access-control-allow-headers"] == ASKED
    assert "access-control-allow-private-network" not in asked.headers
    # A form or a `fetch` without preflight reaches the server, so the server itself must refuse it.
    simple = http.post(URL, content=b"{}", headers={"origin": origin, "content-type": "text/plain"})
    read = http.get("/v1/models", headers={"origin": origin})
    for response in (simple, read):
        assert response.status_code == 403 and response.headers["access-control-allow-origin"] == origin
        error = response.json()["error"]
        assert error["code"] == "origin_not_allowed"
        assert "--cors-origin" in error["message"] and "--api-key" in error["message"]
    assert service.requests == []


def test_what_is_not_refused_cannot_be_read_by_a_stranger(http):
    response = http.options("/v1/models", headers={"origin": SITE})
    assert response.status_code == 204
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_programs_send_no_origin_and_pass(http):
    response = http.post(URL, json=CHAT)
    assert response.status_code == 200
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_the_message_names_the_option_for_pages_of_this_machine(http):
    message = http.post(URL, json=CHAT, headers={"origin": "http://localhost:3000"}).json()["error"]["message"]
    assert "--cors-origin http://localhost:3000" in message and "--cors-origin loopback" in message


@pytest.fixture(scope="module")
def _loopback(open_client) -> httpx.Client:
    return open_client(body_limit=10_000, cors_origins=("loopback", "chrome-extension://abc"))


@pytest.fixture
def loopback(_loopback, stage, service) -> httpx.Client:
    stage.service = service
    return _loopback


@pytest.mark.parametrize("origin", [*LOOPBACK, "chrome-extension://abc"])
def test_an_option_allows_pages_of_this_machine(loopback, origin):
    assert preflight(loopback, origin).headers["access-control-allow-origin"] == origin
    response = loopback.post(URL, json=CHAT, headers={"origin": origin})
    assert response.status_code == 200 and response.headers["access-control-allow-origin"] == origin


@pytest.mark.parametrize(
    "origin", ["null", SITE, "http://localhost.site.example", "http://10.0.0.1", "ftp://localhost"]
)
def test_that_option_allows_no_others(loopback, origin):
    assert loopback.post(URL, json=CHAT, headers={"origin": origin}).status_code == 403


def test_every_refused_origin_is_logged_once(open_client, caplog):
    client = open_client(body_limit=1000)
    with caplog.at_level(logging.WARNING, "millstream.api.origin"):
        for number in range(LOGGED_ORIGINS + 5):
            for _ in range(2):
                client.get("/", headers={"origin": f"https://{number}.example"})
    lines = [record.getMessage() for record in caplog.records if "refused a web page" in record.getMessage()]
    assert len(lines) == len(set(lines)) == LOGGED_ORIGINS
    assert "https://0.example" in lines[0] and "--cors-origin" in lines[0]


def test_with_keys_the_key_decides_and_any_page_may_read(open_client, stage, service):
    stage.service = service
    client = open_client(body_limit=10_000, api_keys=("k",))
    asked = preflight(client, SITE, **{"access-control-request-private-network": "true"})
    assert asked.headers["access-control-allow-headers"] == ASKED
    assert asked.headers["access-control-allow-private-network"] == "true"
    for headers, status in (({}, 401), ({"authorization": "Bearer k"}, 200), ({"x-api-key": "k"}, 200)):
        response = client.post(URL, json=CHAT, headers={"origin": SITE} | headers)
        assert response.status_code == status and response.headers["access-control-allow-origin"] == "*"


def test_the_own_origin_is_allowed_by_the_host_header():
    policy = OriginPolicy()
    assert policy.allows("https://mill.example", "mill.example")
    assert not policy.allows("https://mill.example:1", "mill.example")
    assert not policy.allows("null", "null") and not policy.allows("ftp://mill.example", "mill.example")
