"""GET /v1/mcp/servers."""

from __future__ import annotations

from collections.abc import Sequence

import httpx

from millstream.api.app import create_app
from millstream.service.mcp.servers import McpServers
from millstream.service.ports import ServerTool, ToolServerCard
from support.openapi import Document
from support.services import services

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


class Listed(McpServers):
    def cards(self) -> Sequence[ToolServerCard]:
        return [
            ToolServerCard("maps", "ready", None, (ServerTool("find", "Finds a city.", SCHEMA),)),
            ToolServerCard("files", "failed", "it ended before it was ready"),
            ToolServerCard("web", "starting"),
        ]


def test_servers_with_their_states_and_tools(serve, service) -> None:
    app = create_app(services(service, tool_servers=Listed(())), body_limit=1000)
    with serve(app) as port:
        answer = httpx.get(f"http://127.0.0.1:{port}/v1/mcp/servers")
        page = Document(httpx.get(f"http://127.0.0.1:{port}/openapi.json").json())
    assert answer.status_code == 200
    page.check("/v1/mcp/servers", answer)
    find = {"name": "find", "description": "Finds a city.", "parameters": SCHEMA}
    assert answer.json() == {
        "object": "list",
        "data": [
            {"label": "maps", "object": "mcp_server", "state": "ready", "error": None, "tools": [find]},
            {
                "label": "files",
                "object": "mcp_server",
                "state": "failed",
                "error": "it ended before it was ready",
                "tools": [],
            },
            {"label": "web", "object": "mcp_server", "state": "starting", "error": None, "tools": []},
        ],
    }


def test_none_are_configured(http: httpx.Client) -> None:
    assert http.get("/v1/mcp/servers").json() == {"object": "list", "data": []}


def test_it_needs_the_key(serve, service) -> None:
    app = create_app(services(service, tool_servers=Listed(())), body_limit=1000, api_keys=("key",))
    with serve(app) as port:
        url = f"http://127.0.0.1:{port}/v1/mcp/servers"
        assert httpx.get(url).status_code == 401
        assert httpx.get(url, headers={"authorization": "Bearer key"}).status_code == 200
