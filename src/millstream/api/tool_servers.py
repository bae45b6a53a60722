"""GET /v1/mcp/servers: the MCP servers of the configuration file. No dialect has such a route: it is our own."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from millstream.api.error_docs import ANY_REQUEST, ErrorDocs
from millstream.api.errors import json_response
from millstream.api.openapi import documented
from millstream.api.system_schema import McpServerList
from millstream.service.ports import ToolServerCard, ToolServers


def routes(servers: ToolServers, errors: ErrorDocs) -> APIRouter:
    """`errors` documents the errors of the route, which belongs to the default dialect."""
    router = APIRouter(prefix="/v1/mcp", tags=["system"], default_response_class=Response)
    docs = documented(McpServerList, "All MCP servers, connected or not.", errors=errors.references(ANY_REQUEST))

    @router.get("/servers", summary="List the MCP servers and their tools", openapi_extra=docs)
    async def mcp_servers() -> Response:
        """Requests use a server by its `label`. No server is asked: these are its tools as it last listed them."""
        return json_response({"object": "list", "data": [_fields(card) for card in servers.cards()]})

    return router


def _fields(card: ToolServerCard) -> dict[str, Any]:
    tools = [{"name": tool.name, "description": tool.description, "parameters": tool.parameters} for tool in card.tools]
    return {"label": card.label, "object": "mcp_server", "state": card.state, "error": card.error, "tools": tools}
