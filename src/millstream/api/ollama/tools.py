"""Parses the functions that a model may call."""

from __future__ import annotations

from typing import Any

from millstream.api.functions import MAX_TOOLS, NAME_PATTERN, Tools, check_names, function_tool
from millstream.errors import BadRequest, UnsupportedParameter


def parse_tools(value: object) -> Tools:
    if not isinstance(value, list):
        raise BadRequest("tools must be a list.", param="tools")
    tools = tuple(_tool(item, f"tools[{index}]") for index, item in enumerate(value))
    check_names(tools)
    return tools


def _tool(item: object, path: str) -> dict[str, Any]:
    function = item.get("function") if isinstance(item, dict) else None
    kind = item.get("type") if isinstance(item, dict) else None
    if kind not in (None, "", "function"):
        param = f"{path}.type"
        raise UnsupportedParameter(f"{param} is {str(kind)[:40]!r}; only function is supported.", param=param)
    if not isinstance(function, dict):
        raise BadRequest(f"{path}.function must be an object with a name.", param=f"{path}.function")
    name, description, parameters = (function.get(field) for field in ("name", "description", "parameters"))
    return function_tool(name, description, parameters, path=f"{path}.function")


_TEXT: dict[str, Any] = {"type": ["string", "null"]}
_PARAMETERS: dict[str, Any] = {
    "type": ["object", "null"],
    "description": "A JSON schema of the arguments.",
    "properties": {
        "type": {"const": "object"},
        "properties": {"type": "object", "additionalProperties": {"type": ["object", "boolean"]}},
        "required": {"type": "array", "items": {"type": "string"}},
    },
}
TOOLS: dict[str, Any] = {
    "type": "array",
    "maxItems": MAX_TOOLS,
    "items": {
        "type": "object",
        "required": ["function"],
        "properties": {
            "type": {"enum": ["function", "", None]},
            "function": {
                "type": "object",
                "required": ["name"],
                "properties": {
                    "name": {"type": "string", "pattern": f"^{NAME_PATTERN}$"},
                    "description": _TEXT,
                    "parameters": _PARAMETERS,
                },
            },
        },
    },
}
