"""Host names that a server accepts, and clients that may use its admin routes."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from millstream.api.addresses import is_loopback_address
from millstream.api.app import create_app
from millstream.api.hosts import KnownHosts, names_to_check
from millstream.errors import HostNotAllowed
from support.services import services

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
LOCAL = "127.0.0.1"


def ask(app, method="GET", path="/health", *, headers=None, client=(LOCAL, 1), **body):
    async def main():
        transport = httpx.ASGITransport(app, client=client)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await http.request(method, path, headers=headers, **body)

    return asyncio.run(main())


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8000", "localhost.", "app.localhost:1", "127.0.0.1", "127.8.9.1:80", "[::1]:8000", "[::1]",
     "[::ffff:127.0.0.1]", "mill.example:8000", "MILL.example"],
)  # fmt: skip
def test_loopback_names_and_allowed_hosts_pass(service, host):
    app = create_app(services(service), body_limit=10_000, hosts=names_to_check(LOCAL, ("mill.example",)))
    assert ask(app, headers={"host": host}).status_code == 200
    assert ask(app, "POST", "/v1/chat/completions", headers={"host": host}, json=CHAT).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "xlocalhost", "127.0.0.1.evil.example", "10.0.0.1",
     "0.0.0.0", "", " ", "localhost:8000:1", "evil@localhost", "[::1", "[::2]", "localhost/", "x" * 9000],
)  # fmt: skip
@pytest.mark.parametrize("method, path", [("GET", "/health"), ("GET", "/"), ("POST", "/v1/chat/completions")])
def test_other_hosts_are_refused(service, host, method, path):
    """Even if the origin of the page matches the Host header, as after DNS rebinding."""
    app = create_app(services(service), body_limit=10_000, hosts=names_to_check(LOCAL, ()))
    response = ask(app, method, path, headers={"host": host, "origin": f"http://{host}"}, json=CHAT)
    assert response.status_code == 403 and len(response.text) < 1000
    found = response.json()["error"]
    assert (found["code"], found["type"]) == ("host_not_allowed", "permission_error")
    assert "--allowed-host" in found["message"]
    assert service.requests == []


def test_names_to_check():
    assert names_to_check("127.0.0.1", ()) == {"127.0.0.1"}
    assert names_to_check("::1", ()) == {"::1"}
    assert names_to_check("0.0.0.0", ()) is None
    assert names_to_check("192.168.1.5", ("Mill.example.",)) == {"192.168.1.5", "mill.example"}
    assert names_to_check("127.0.0.1", ("*",)) is None


def test_only_http_and_websockets_pass():
    async def app(scope, receive, send):
        raise AssertionError("reached")

    with pytest.raises(HostNotAllowed):
        asyncio.run(KnownHosts(app, None)({"type": "other", "path": "/"}, None, None))
    strange = {"type": "websocket", "path": "/", "headers": [(b"host", b"other.example")]}
    with pytest.raises(HostNotAllowed):
        asyncio.run(KnownHosts(app, ["mill.example"])(strange, None, None))


ADMIN = [f"/v1/models/org/tiny/{act}" for act in ("load", "unload", "cache/clear")]


@pytest.mark.parametrize("path", ADMIN)
def test_admin_routes_need_a_key_or_this_machine(service, path):
    done = []
    card = service.cards[0]

    async def act(name):
        done.append(name)
        return card

    service.load = service.unload = act
    service.clear_cache = lambda name: done.append(name) or card
    plain = create_app(services(service), body_limit=10_000)
    for client in [("192.168.1.9", 5), ("::ffff:192.168.1.9", 5), ("2001:db8::1", 5), ("evil", 5)]:
        response = ask(plain, "POST", path, client=client)
        assert response.status_code == 403 and response.json()["error"]["code"] == "admin_not_allowed"
        assert "--api-key" in response.json()["error"]["message"]
        assert ask(plain, "GET", "/v1/models", client=client).status_code == 200
    assert done == []
    for client in [(LOCAL, 5), ("127.9.9.9", 5), ("::1", 5), ("::ffff:127.0.0.1", 5), None]:
        assert ask(plain, "POST", path, client=client).status_code == 200
    locked = create_app(services(service), body_limit=10_000, api_keys=("k",))
    remote = ("192.168.1.9", 5)
    assert ask(locked, "POST", path, client=(LOCAL, 5)).status_code == 401
    assert ask(locked, "POST", path, client=remote, headers={"x-api-key": "k"}).status_code == 200


def test_loopback_addresses():
    assert all(map(is_loopback_address, ["127.0.0.1", "127.1.2.3", "::1", "::ffff:127.0.0.1", "::1%lo"]))
    assert not any(map(is_loopback_address, ["", "localhost", "0.0.0.0", "::", "::ffff:10.0.0.1", "128.0.0.1", "1"]))
