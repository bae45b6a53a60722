"""Response models of the routes about the server itself, for /openapi.json."""

from __future__ import annotations

from typing import Any, Literal

from millstream.api.response_schema import ABSENT, ResponseSchema

State = Literal["unloaded", "loading", "ready", "unloading", "failed", "stopped"]


class About(ResponseSchema):
    """The server's name and version."""

    name: Literal["Millstream"]
    version: str
    docs: str
    """The path of the page that documents the API."""


class Health(ResponseSchema):
    """The server's own view. It asks no engine, so it responds while every engine is busy."""

    status: Literal["ok", "degraded", "failed"]
    """ok: every model is ready or will be when it is used. degraded: some models have failed, or there are problems.
    failed: all models have."""
    models: dict[str, State]
    """The state of each model."""
    problems: list[str] = ABSENT
    """What does not work now though requests are answered, such as writing to a full disk."""


class McpTool(ResponseSchema):
    """A tool of an MCP server."""

    name: str
    description: str
    parameters: dict[str, Any]
    """The JSON schema of its arguments."""


class McpServer(ResponseSchema):
    """An MCP server of the configuration file."""

    label: str
    """The name that requests use."""
    object: Literal["mcp_server"]
    state: Literal["starting", "ready", "failed"]
    """A server that failed is started again after a pause."""
    error: str | None
    """Why it failed, or why it is started again."""
    tools: list[McpTool]
    """The tools that it listed last."""


class McpServerList(ResponseSchema):
    """The MCP servers of the configuration file."""

    object: Literal["list"]
    data: list[McpServer]
