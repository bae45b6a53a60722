"""Functions that a model may call: what every dialect checks of a tool. Errors are found here, not by a chat template
while it renders a prompt."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from millstream.errors import BadRequest
from millstream.exact_json import dumps_text

MAX_TOOLS = 512
NAME_PATTERN = r"[a-zA-Z0-9_.-]{1,128}"
_NAME = re.compile(NAME_PATTERN)

Function = Mapping[str, Any]
Tools = tuple[dict[str, Any], ...]
"""In the form of `ToolUse.tools`."""


def function_tool(
    name: object, description: object, parameters: object, *, path: str, schema_name: str = "parameters"
) -> dict[str, Any]:
    """Returns a tool in the form of `ToolUse`. `path` and `schema_name` name the fields of the request, for errors."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        param = f"{path}.name"
        raise BadRequest(f"{param} must be 1 to 128 letters, digits, dots, dashes and underscores.", param=param)
    if description is not None and not isinstance(description, str):
        raise BadRequest(f"{path}.description must be a string.", param=f"{path}.description")
    if parameters is not None:
        _check_schema(parameters, f"{path}.{schema_name}")
    # Chat templates use all three without checking whether they are present, and write them in this order.
    schema = {"type": "object", "properties": {}} if parameters is None else parameters
    return {"type": "function", "function": {"name": name, "description": description or "", "parameters": schema}}


def arguments_text(arguments: object, param: str) -> str:
    """Returns the arguments of a call in a history as JSON: clients send the text that they got, or the object in it.
    No text and null stand for no arguments."""
    if isinstance(arguments, dict):
        return dumps_text(arguments)
    if arguments is not None and not isinstance(arguments, str):
        raise BadRequest(f"{param} must be an object, or its JSON as a string.", param=param)
    return arguments or "{}"


def check_names(tools: Sequence[Mapping[str, Any]], param: str = "tools") -> None:
    """Raises `BadRequest` if there are too many tools, or two of one name."""
    if len(tools) > MAX_TOOLS:
        raise BadRequest(f"{param} has {len(tools)} tools; at most {MAX_TOOLS} are allowed.", param=param)
    names: set[str] = set()
    for tool in tools:
        name = tool["function"]["name"]
        if name in names:
            raise BadRequest(f"{param} has two functions named {name!r}. Names must differ.", param=param)
        names.add(name)


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
