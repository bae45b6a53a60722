"""Parses `tools` and `tool_choice`. Errors are found here, not by a chat template while it renders a prompt."""

from __future__ import annotations

import re
from typing import Any

from millstream.errors import BadRequest, UnsupportedParameter
from millstream.types import ToolUse

MAX_TOOLS = 128
NAME_PATTERN = r"[a-zA-Z0-9_.-]{1,64}"
CHOICES = ("none", "auto", "required")
_NAME = re.compile(NAME_PATTERN)
_FUNCTION_FIELDS = frozenset({"name", "description", "parameters", "strict"})

Tools = tuple[dict[str, Any], ...]


def parse_tools(value: object) -> Tools:
    if not isinstance(value, list):
        raise BadRequest("tools must be a list.", param="tools")
    if len(value) > MAX_TOOLS:
        raise BadRequest(f"tools has {len(value)} tools; at most {MAX_TOOLS} are allowed.", param="tools")
    tools = tuple(_tool(item, f"tools[{index}]") for index, item in enumerate(value))
    names: set[str] = set()
    for index, tool in enumerate(tools):
        name = tool["function"]["name"]
        if name in names:
            param = f"tools[{index}].function.name"
            raise BadRequest(
                f"{param} is {name!r}, which is the name of an earlier function. Names must differ.", param=param
            )
        names.add(name)
    return tools


def _tool(item: object, path: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise BadRequest(f"{path} must be an object with a type and a function.", param=path)
    kind = item.get("type", "function")
    if kind != "function":
        raise UnsupportedParameter(
            f"{path}.type is {str(kind)[:40]!r}; only function is supported.", param=f"{path}.type"
        )
    function = item.get("function")
    if not isinstance(function, dict):
        raise BadRequest(f"{path}.function must be an object with a name.", param=f"{path}.function")
    return {"type": "function", "function": _function(function, f"{path}.function")}


def _function(function: dict[str, Any], path: str) -> dict[str, Any]:
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        param = f"{path}.name"
        raise BadRequest(f"{param} must be 1 to 64 letters, digits, dots, dashes and underscores.", param=param)
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise BadRequest(f"{path}.description must be a string.", param=f"{path}.description")
    parameters = function.get("parameters")
    if parameters is not None:
        _check_schema(parameters, f"{path}.parameters")
    known = {key: value for key, value in function.items() if key in _FUNCTION_FIELDS and value is not None}
    # Chat templates use all three without checking whether they are present.
    return {"description": "", "parameters": {"type": "object", "properties": {}}, **known}


def _check_schema(schema: object, path: str) -> None:
    if not isinstance(schema, dict):
        raise BadRequest(f"{path} must be a JSON schema, which is an object.", param=path)
    if schema and schema.get("type", "object") != "object":
        raise BadRequest(f"{path}.type must be object, since arguments have names.", param=f"{path}.type")
    properties = schema.get("properties", {})
    if not isinstance(properties, dict) or not all(isinstance(value, dict | bool) for value in properties.values()):
        raise BadRequest(f"{path}.properties must map names to JSON schemas.", param=f"{path}.properties")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise BadRequest(f"{path}.required must be a list of names.", param=f"{path}.required")


def tool_use(tools: Tools, choice: object, parallel: bool | None) -> ToolUse | None:
    """Returns None if there are no tools. `choice` is the value that the client sent."""
    mode, name = _choice(choice)
    if not tools:
        if choice not in (None, "none", "auto"):
            raise BadRequest("tool_choice requires a call, but there are no tools.", param="tool_choice")
        if parallel is not None:
            raise BadRequest("parallel_tool_calls needs tools.", param="parallel_tool_calls")
        return None
    names = [tool["function"]["name"] for tool in tools]
    if name is not None and name not in names:
        raise BadRequest(
            f"tool_choice names the function {name[:64]!r}, which is not among the tools: {', '.join(names)}.",
            param="tool_choice",
        )
    return ToolUse(tools, mode, name, parallel is not False)


def _choice(choice: object) -> tuple[Any, str | None]:
    match choice:
        case None:
            return "auto", None
        case str(mode) if mode in CHOICES:
            return mode, None
        case {"type": "function", "function": {"name": str(name)}}:
            return "required", name
        case _:
            raise BadRequest(
                'tool_choice must be none, auto, required or {"type": "function", "function": {"name": "..."}}.',
                param="tool_choice",
            )
