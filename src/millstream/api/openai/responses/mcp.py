"""Calls of MCP servers: they run beside the engine, and their failures are outputs for the model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from millstream.api.openai.responses.builder import OutputBuilder
from millstream.api.openai.responses.items_out import Event, JsonItem, McpItem
from millstream.api.openai.responses.tools import Catalog, McpServer
from millstream.errors import BadRequest
from millstream.exact_json import loads
from millstream.service.ports import ServerTool, ToolOutput, ToolServers

_SPENT = "The limit of tool calls (max_tool_calls) is reached. Answer without further calls."


def check_labels(servers: Sequence[McpServer], known: Sequence[str]) -> None:
    """Raises `BadRequest` if a request names an MCP server that is not configured. No request can bring its own URL:
    the server would call it from inside its network."""
    for server in servers:
        if server.label not in known:
            listed = f"Configured are: {', '.join(known)}." if known else "None is configured."
            raise BadRequest(
                f"{server.path}.server_label names the MCP server {server.label[:64]!r}, which this server does not "
                f"know. {listed} A server_url is not used; MCP servers stand in the configuration file, in "
                "[mcp.servers].",
                param=f"{server.path}.server_label",
            )


class McpCalls:
    """The calls of one response, within its limit."""

    def __init__(self, servers: ToolServers, limit: int | None) -> None:
        self._servers = servers
        self._left = limit

    @property
    def spent(self) -> bool:
        return self._left is not None and self._left <= 0

    async def list_tools(self, catalog: Catalog) -> tuple[Catalog, dict[str, list[ServerTool]]]:
        """Asks all servers of a request for their tools."""
        listed: dict[str, list[ServerTool]] = {}
        for server in catalog.servers:
            tools = [tool for tool in await self._servers.tools(server.label) if server.offers(tool.name)]
            catalog = catalog.with_server(server, tools)
            listed[server.label] = tools
        return catalog, listed

    async def run(self, calls: Sequence[McpItem], builder: OutputBuilder) -> list[Event]:
        """Runs calls at the same time. Their outputs stay in the order of the calls."""
        outputs = await asyncio.gather(*[self._call(call) for call in calls])
        events: list[Event] = []
        for call, output in zip(calls, outputs, strict=True):
            events += call.settle(output)
            builder.settled(call)
        return events

    async def _call(self, call: McpItem) -> ToolOutput:
        if self.spent:
            return ToolOutput(_SPENT, is_error=True)
        if self._left is not None:
            self._left -= 1
        try:
            arguments = loads(call.text or "{}")
        except ValueError as error:
            return ToolOutput(f"The arguments are not valid JSON: {error}.", is_error=True)
        if not isinstance(arguments, dict):
            return ToolOutput("The arguments must be a JSON object.", is_error=True)
        label = call.offer.namespace
        assert label is not None
        return await self._servers.call(label, call.offer.name, arguments)


def approvals(items: Sequence[JsonItem]) -> list[JsonItem]:
    """The requests that were approved, and whose calls have not run yet."""
    requests = {item["id"]: item for item in items if item.get("type") == "mcp_approval_request"}
    run = {item.get("approval_request_id") for item in items if item.get("type") == "mcp_call"}
    given = [
        item.get("approval_request_id")
        for item in items
        if item.get("type") == "mcp_approval_response" and item.get("approve") is True
    ]
    return [requests[request] for request in dict.fromkeys(given) if request in requests and request not in run]
