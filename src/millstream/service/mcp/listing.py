"""The tools of an MCP server: those that a model can be offered, and that the configuration allows."""

from __future__ import annotations

import json
import logging
import re

from mcp.client import Client
from mcp.types import Tool

from millstream.config import ToolServerSpec
from millstream.service.ports import ServerTool

log = logging.getLogger(__name__)

NAME_PATTERN = r"[a-zA-Z0-9_.-]{1,128}"
"""The names that requests may use, as in `api/functions.py`; a test compares them."""
MAX_TOOLS = 512
MAX_SCHEMA_CHARS = 64 * 1024
MAX_DESCRIPTION_CHARS = 16 * 1024
_MAX_PAGES = 100


class ToolListing:
    """Reads the tools of one server. What it leaves out is logged once."""

    def __init__(self, spec: ToolServerSpec) -> None:
        self._label = spec.label
        self._allowed = spec.tools
        self._noted: set[str] = set()

    async def read(self, client: Client) -> tuple[ServerTool, ...]:
        offered: dict[str, ServerTool] = {}
        for tool in await _all_tools(client):
            if self._allowed is not None and tool.name not in self._allowed:
                continue
            if problem := _problem(tool):
                self._note(f"the tool {tool.name[:200]!r} is left out: {problem}")
            elif len(offered) == MAX_TOOLS:
                self._note(f"tools are left out: it has more than {MAX_TOOLS}")
                break
            else:
                offered[tool.name] = ServerTool(tool.name, tool.description or "", tool.input_schema)
        for name in self._allowed or ():
            if name not in offered:
                self._note(f"the configuration names a tool {name!r} that it does not offer")
        return tuple(offered.values())

    def _note(self, text: str) -> None:
        if text not in self._noted and len(self._noted) < MAX_TOOLS:
            self._noted.add(text)
            log.warning("MCP server %s: %s", self._label, text)


async def _all_tools(client: Client) -> list[Tool]:
    if client.server_capabilities.tools is None:
        return []
    tools: list[Tool] = []
    cursor: str | None = None
    for _ in range(_MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None or len(tools) > MAX_TOOLS:
            break
    return tools


def _problem(tool: Tool) -> str | None:
    """Why a model cannot be offered the tool. Each dialect would refuse it, and with it the whole request."""
    schema = tool.input_schema
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    if not re.fullmatch(NAME_PATTERN, tool.name):
        return "its name is not 1 to 128 letters, digits, dots, dashes and underscores"
    if schema.get("type", "object") != "object":
        return "its schema does not describe an object"
    if not isinstance(properties, dict) or not all(isinstance(value, dict | bool) for value in properties.values()):
        return "the properties of its schema are not schemas"
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        return "its schema has a required that is not a list of names"
    if len(json.dumps(schema)) > MAX_SCHEMA_CHARS or len(tool.description or "") > MAX_DESCRIPTION_CHARS:
        return "its schema or its description is too long"
    return None
