"""MCP servers at a URL: mcp's own server on a local port, that goes away and comes back."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import pytest

from millstream.config import ToolServerSpec
from millstream.service.mcp import transport
from support.mcp_clients import connected, http_server
from support.mcp_server import make_server


class WantsKey:
    """An app that answers requests with a header only."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and (b"x-key", b"hush") not in scope["headers"]:
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        await self._app(scope, receive, send)


def spec(port: int, path: str, **options: Any) -> ToolServerSpec:
    return ToolServerSpec("web", url=f"http://127.0.0.1:{port}/{path}", headers=(("X-Key", "hush"),), **options)


def test_streamable_http_and_a_restart() -> None:
    with ExitStack() as stack:
        first = stack.enter_context(ExitStack())
        port = first.enter_context(http_server(WantsKey(make_server().streamable_http_app())))
        subject = stack.enter_context(connected([spec(port, "mcp", timeout=20.0)]))
        assert "add" in [tool.name for tool in subject.run(subject.servers.tools("web"))]
        assert subject.call("web", "add", a=1, b=2).text == "3"
        first.close()
        assert subject.call("web", "add", a=1, b=2).is_error
        subject.wait_for("web", "failed")
        with http_server(WantsKey(make_server().streamable_http_app()), port):
            subject.wait_for("web", "ready")
            assert subject.call("web", "add", a=2, b=3).text == "5"


class OlderVersion:
    """An app that knows the older handshake only, which makes a session."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and (b"mcp-method", b"server/discover") in scope["headers"]:
            await send({"type": "http.response.start", "status": 404, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        await self._app(scope, receive, send)


def test_a_session_that_the_server_has_forgotten() -> None:
    with ExitStack() as stack:
        first = stack.enter_context(ExitStack())
        port = first.enter_context(http_server(OlderVersion(make_server().streamable_http_app(json_response=True))))
        subject = stack.enter_context(connected([spec(port, "mcp", timeout=20.0)]))
        assert subject.call("web", "echo", text="x").text == "x"
        first.close()
        stack.enter_context(http_server(OlderVersion(make_server().streamable_http_app(json_response=True)), port))
        assert subject.call("web", "echo", text="x").is_error
        deadline = time.monotonic() + 60
        while subject.call("web", "echo", text="x").is_error:
            assert time.monotonic() < deadline


def test_sse() -> None:
    with (
        http_server(WantsKey(make_server().sse_app())) as port,
        connected([spec(port, "sse", transport="sse")]) as subject,
    ):
        assert subject.call("web", "add", a=1, b=2).text == "3"


def test_a_refused_key_is_said() -> None:
    with http_server(WantsKey(make_server().streamable_http_app())) as port:
        wrong = ToolServerSpec("web", url=f"http://127.0.0.1:{port}/mcp", headers=(("X-Key", "wrong"),))
        with connected([wrong]) as subject:
            subject.wait_for("web", "failed")
            assert "Server returned an error response" in (subject.card("web").error or "")


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize("stateless", [True, False])
def test_responses_have_a_size_limit(as_json: bool, stateless: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MAX_MESSAGE_BYTES", 100_000)
    app = make_server().streamable_http_app(json_response=as_json, stateless_http=stateless)
    with http_server(app) as port, connected([spec(port, "mcp", timeout=10.0)]) as subject:
        assert subject.call("web", "big", size=1000).text == "x" * 1000
        output = subject.call("web", "big", size=100_000)
        assert output.is_error and "time limit" not in output.text
        assert subject.call("web", "echo", text="again").text == "again"
