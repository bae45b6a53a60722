"""Parses `tools` and `tool_choice`, and their older names `functions` and `function_call`. Errors are found here, not
by a chat template while it renders a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from millstream.api.functions import Tools, check_names, function_tool
from millstream.api.openai.custom_tools import custom_tool, parse_format
from millstream.errors import BadRequest, UnsupportedParameter
from millstream.types import Grammar, ToolUse, quickly_made

CHOICES = ("none", "auto", "required", "any")
"""`any` is Mistral's word for `required`."""
Mode = Literal["auto", "none", "required"]


@quickly_made
@dataclass(frozen=True, slots=True)
class ToolSet:
    """The tools of a request."""

    tools: Tools = ()
    custom: frozenset[str] = frozenset()
    """Names of tools that take free text."""
    input_grammars: tuple[tuple[str, Grammar], ...] = ()

    @property
    def names(self) -> list[str]:
        return [tool["function"]["name"] for tool in self.tools]


@quickly_made
@dataclass(frozen=True, slots=True)
class Choice:
    """What `tool_choice` asks for."""

    mode: Mode = "auto"
    name: str | None = None
    allowed: frozenset[str] | None = None

    @property
    def named(self) -> frozenset[str]:
        return frozenset({self.name} if self.name is not None else ()) | (self.allowed or frozenset())


def parse_tools(value: object) -> ToolSet:
    if not isinstance(value, list):
        raise BadRequest("tools must be a list.", param="tools")
    tools: list[dict[str, Any]] = []
    custom: set[str] = set()
    grammars: list[tuple[str, Grammar]] = []
    for index, item in enumerate(value):
        path = f"tools[{index}]"
        if isinstance(item, dict) and item.get("type") == "custom":
            inner, path = _inner(item, "custom", path)
            tool = custom_tool(inner.get("name"), inner.get("description"), path)
            name = tool["function"]["name"]
            custom.add(name)
            if (grammar := parse_format(inner.get("format"), f"{path}.format")) is not None:
                grammars.append((name, grammar))
        else:
            tool = _tool(item, path)
        tools.append(tool)
    check_names(tools)
    return ToolSet(tuple(tools), frozenset(custom), tuple(grammars))


def parse_functions(value: object) -> ToolSet:
    """The older form: a list of functions."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise BadRequest("functions must be a list of objects.", param="functions")
    tools = tuple(_function(item, f"functions[{index}]") for index, item in enumerate(value))
    check_names(tools, "functions")
    return ToolSet(tools)


def _tool(item: object, path: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise BadRequest(f"{path} must be an object with a type and a function.", param=path)
    kind = item.get("type", "function")
    if kind != "function":
        raise UnsupportedParameter(
            f"{path}.type is {str(kind)[:40]!r}; only function and custom are supported.", param=f"{path}.type"
        )
    return _function(*_inner(item, "function", path))


def _inner(item: Mapping[str, Any], kind: str, path: str) -> tuple[Mapping[str, Any], str]:
    """Returns the object with the name. In OpenAI's other API, the fields are those of the tool itself."""
    if kind not in item and "name" in item:
        return item, path
    inner = item.get(kind)
    if not isinstance(inner, dict):
        raise BadRequest(f"{path}.{kind} must be an object with a name.", param=f"{path}.{kind}")
    return inner, f"{path}.{kind}"


def _function(function: Mapping[str, Any], path: str) -> dict[str, Any]:
    name, description, parameters = (function.get(field) for field in ("name", "description", "parameters"))
    return function_tool(name, description, parameters, path=path)


def tool_use(tools: ToolSet, choice: Choice, parallel: bool | None, *, param: str = "tool_choice") -> ToolUse | None:
    """Returns None if there are no tools. `param` is the field that the choice came from."""
    if not tools.tools:
        if choice.mode == "required":
            raise BadRequest(f"{param} requires a call, but there are no tools.", param=param)
        return None
    for name in sorted(choice.named):
        if name not in tools.names:
            raise BadRequest(
                f"{param} names the function {name[:64]!r}, which is not among the tools: {', '.join(tools.names)}.",
                param=param,
            )
    return ToolUse(tools.tools, choice.mode, choice.name, parallel is not False, choice.allowed, tools.input_grammars)


def parse_choice(choice: object) -> Choice:
    fields: dict[str, Any] = choice if isinstance(choice, dict) else {"type": choice}
    match fields.get("type"):
        case str(word) if word in CHOICES:
            return Choice(_mode(word))
        case ("function" | "custom") as kind if (name := _name(fields, kind)) is not None:
            return Choice("required", name)
        case "allowed_tools":
            inner = fields.get("allowed_tools", fields)
            return _allowed(inner if isinstance(inner, dict) else {})
    raise BadRequest(
        'tool_choice must be none, auto, required or {"type": "function", "function": {"name": "..."}}, or an object '
        "of the type allowed_tools.",
        param="tool_choice",
    )


def parse_function_call(value: object) -> Choice:
    """The older form of `tool_choice`."""
    match value:
        case "none" | "auto" as word:
            return Choice(_mode(word))
        case {"name": str(name)}:
            return Choice("required", name)
    raise BadRequest('function_call must be none, auto or {"name": "..."}.', param="function_call")


def _allowed(allowed: Mapping[str, Any]) -> Choice:
    path = "tool_choice.allowed_tools"
    mode, tools = allowed.get("mode", "auto"), allowed.get("tools")
    if mode not in ("auto", "required"):
        raise BadRequest(f"{path}.mode must be auto or required.", param=f"{path}.mode")
    if not isinstance(tools, list) or not tools:
        raise BadRequest(f"{path}.tools must be a list of at least one tool.", param=f"{path}.tools")
    names: set[str] = set()
    for index, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else None
        name = _name(tool, kind) if kind in ("function", "custom") else None
        if name is None:
            at = f"{path}.tools[{index}]"
            raise BadRequest(f'{at} must be {{"type": "function", "function": {{"name": "..."}}}}.', param=at)
        names.add(name)
    return Choice(_mode(mode), allowed=frozenset(names))


def _name(tool: Mapping[str, Any], kind: str) -> str | None:
    """The name that a reference to a tool has, inside an object or beside its type."""
    inner = tool.get(kind, tool)
    name = inner.get("name") if isinstance(inner, dict) else None
    return name if isinstance(name, str) else None


def _mode(word: str) -> Mode:
    return "none" if word == "none" else "auto" if word == "auto" else "required"
