"""The MCP servers of the configuration file. Implements `ports.ToolServers`.

The mcp package is an extra: nothing here imports it unless a server is configured.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from millstream.config import ToolServerSpec
from millstream.errors import BadRequest, ModelError
from millstream.service.ports import ServerTool, ToolOutput, ToolServerCard

if TYPE_CHECKING:
    from millstream.service.mcp.tool_server import Pauses, ToolServer


class McpServers:
    """Made on a running event loop. `start` returns at once; the servers start in the background."""

    def __init__(self, specs: Sequence[ToolServerSpec], pauses: Pauses | None = None) -> None:
        """Raises `ModelError` if there are servers and the mcp package is missing."""
        self._servers = {spec.label: _server(spec, pauses) for spec in specs}

    @property
    def labels(self) -> Sequence[str]:
        return tuple(self._servers)

    def cards(self) -> Sequence[ToolServerCard]:
        return [server.card for server in self._servers.values()]

    async def tools(self, label: str) -> Sequence[ServerTool]:
        return await self._server(label).tools()

    async def call(self, label: str, name: str, arguments: dict[str, Any]) -> ToolOutput:
        return await self._server(label).call(name, arguments)

    def start(self) -> None:
        for server in self._servers.values():
            server.start()

    async def close(self) -> None:
        """Ends all connections and processes, in bounded time. Running calls fail."""
        await asyncio.gather(*(server.close() for server in self._servers.values()))

    def kill(self) -> None:
        """Ends all processes without waiting."""
        for server in self._servers.values():
            server.kill()

    def _server(self, label: str) -> ToolServer:
        server = self._servers.get(label)
        if server is None:
            known = f"configured are {', '.join(self._servers)}" if self._servers else "none is configured"
            raise BadRequest(f"There is no MCP server {label[:64]!r}: {known}.")
        return server


def _server(spec: ToolServerSpec, pauses: Pauses | None) -> ToolServer:
    try:
        from millstream.service.mcp.tool_server import Pauses, ToolServer
    except ImportError as error:
        raise ModelError(
            f"[mcp.servers.{spec.label}] needs the mcp package, version 2 or newer: pip install 'millstream[mcp]' "
            f"({error})"
        ) from error
    return ToolServer(spec, pauses or Pauses())
