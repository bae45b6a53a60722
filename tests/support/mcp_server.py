"""A small MCP server: tools that answer, take long, fail, say a lot or die. As a script it talks over stdio."""

from __future__ import annotations

import asyncio
import os
import sys

from mcp.server.mcpserver import Image, MCPServer
from mcp.types import CallToolResult, EmbeddedResource, ResourceLink, TextContent, TextResourceContents


def grown() -> str:
    return "new"


def make_server() -> MCPServer:
    server = MCPServer("tests")

    @server.tool()
    def echo(text: str) -> str:
        """Returns the text."""
        return text

    @server.tool()
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    @server.tool()
    async def sleep(seconds: float) -> str:
        """Takes its time."""
        await asyncio.sleep(seconds)
        return "slept"

    @server.tool()
    def fail() -> str:
        raise ValueError("no luck today")

    @server.tool()
    def die() -> str:
        print("dying of a cause", file=sys.stderr, flush=True)
        os._exit(3)

    @server.tool()
    def big(size: int) -> str:
        return "x" * size

    @server.tool()
    def variables() -> dict[str, str]:
        return dict(os.environ)

    @server.tool()
    def pid() -> int:
        return os.getpid()

    @server.tool()
    def grow() -> str:
        """Adds a tool to the server."""
        server.add_tool(grown)
        return "grown"

    @server.tool()
    def picture() -> Image:
        return Image(data=b"12345", format="png")

    @server.tool()
    def mixed() -> CallToolResult:
        note = TextResourceContents(uri="memo://1", text="a note")
        link = ResourceLink(name="page", uri="https://example.com/page", mime_type="text/html")
        parts = [TextContent(text="first"), EmbeddedResource(resource=note), link]
        return CallToolResult(content=parts, structured_content={"left": "out"})

    @server.tool()
    def structured() -> CallToolResult:
        return CallToolResult(content=[], structured_content={"größe": [1, 2]})

    @server.tool(name="a bad name")
    def unnamed() -> str:
        return "never offered"

    return server


if __name__ == "__main__":
    make_server().run("stdio")
