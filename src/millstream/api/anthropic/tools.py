"""Parses `tools` and `tool_choice`. Errors are found here, not by a chat template while it renders a prompt."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from millstream.api.anthropic.client_tools import definition
from millstream.api.functions import Tools, check_names, function_tool
from millstream.errors import BadRequest, UnsupportedParameter
from millstream.types import ToolUse

HOSTED = re.compile(r"[a-z][a-z0-9_]*_\d{8}|mcp_toolset")
"""Types of the tools that Anthropic defines: a name and a date."""

_MODES = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}


@dataclass(frozen=True, slots=True)
class ToolList:
    """The tools that the model sees."""

    tools: Tools = ()
    left_out: frozenset[str] = frozenset()
    """Names of tools that run at Anthropic only."""
    hosted: frozenset[str] = frozenset()
    """Types of those."""
    eager: frozenset[str] = frozenset()
    """Names of tools whose arguments are streamed as they are generated."""


def parse_tools(value: object) -> ToolList:
    if not isinstance(value, list):
        raise BadRequest("tools must be a list.", param="tools")
    tools: list[dict[str, Any]] = []
    hosted: list[dict[str, Any]] = []
    eager: set[str] = set()
    for index, item in enumerate(value):
        path = f"tools[{index}]"
        if not isinstance(item, dict):
            raise BadRequest(f"{path} must be an object with a name and an input_schema.", param=path)
        tool = _tool(item, path)
        if tool is None:
            hosted.append(item)
            continue
        tools.append(tool)
        if item.get("eager_input_streaming") is True:
            eager.add(tool["function"]["name"])
    check_names(tools)
    names = frozenset(str(item.get("name", "")) for item in hosted)
    return ToolList(tuple(tools), names, frozenset(str(item["type"]) for item in hosted), frozenset(eager))


def _tool(item: dict[str, Any], path: str) -> dict[str, Any] | None:
    """Returns None if the tool runs at Anthropic only."""
    kind, name, description, schema = (item.get(key) for key in ("type", "name", "description", "input_schema"))
    if kind not in (None, "custom"):
        if not isinstance(kind, str) or not HOSTED.fullmatch(kind):
            raise UnsupportedParameter(
                f"{path}.type must be custom, or a type of a tool that Anthropic defines.", param=f"{path}.type"
            )
        known = definition(kind)
        if known is None:
            return None
        description, schema = known
    return function_tool(name, description, schema, path=path, schema_name="input_schema")


def tool_use(offered: ToolList, choice: object) -> ToolUse | None:
    """Returns None if there are no tools. `choice` is the value that the client sent."""
    mode, name, parallel = _choice(choice)
    if not offered.tools:
        if mode == "required":
            raise BadRequest(
                "tool_choice requires a call, but there are no tools that this server can offer.", param="tool_choice"
            )
        return None
    names = [tool["function"]["name"] for tool in offered.tools]
    if name in offered.left_out:
        raise UnsupportedParameter(
            f"tool_choice names the tool {name!r}, which runs at Anthropic only.", param="tool_choice.name"
        )
    if name is not None and name not in names:
        raise BadRequest(
            f"tool_choice.name is {name[:64]!r}, which is not among the tools: {', '.join(names)}.",
            param="tool_choice.name",
        )
    return ToolUse(offered.tools, mode, name, parallel)


def _choice(choice: object) -> tuple[Any, str | None, bool]:
    """Returns the mode, the name of the tool that must be called, and whether there may be several calls."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    if choice is None:
        return "auto", None, True
    if not isinstance(choice, dict) or not isinstance(kind, str) or kind not in _MODES:
        raise BadRequest(
            'tool_choice must be {"type": "auto"}, {"type": "any"}, {"type": "none"} or '
            '{"type": "tool", "name": "..."}.',
            param="tool_choice",
        )
    name = choice.get("name") if kind == "tool" else None
    if kind == "tool" and not isinstance(name, str):
        raise BadRequest("tool_choice.name must be the name of a tool.", param="tool_choice.name")
    single = choice.get("disable_parallel_tool_use")
    if not isinstance(single, bool | None):
        param = "tool_choice.disable_parallel_tool_use"
        raise BadRequest(f"{param} must be true or false.", param=param)
    return _MODES[kind], name, not single
