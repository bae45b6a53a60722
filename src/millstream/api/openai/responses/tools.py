"""Parses `tools`: functions, custom tools, namespaces and MCP servers. Hosted tools are left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from millstream.api.functions import check_names, function_tool
from millstream.api.openai.custom_tools import custom_tool, parse_format
from millstream.api.openai.responses.names import joined_name
from millstream.errors import BadRequest
from millstream.service.ports import ServerTool
from millstream.types import Grammar

Kind = Literal["function", "custom", "mcp"]

_HOSTED = frozenset(
    {
        "file_search",
        "code_interpreter",
        "image_generation",
        "local_shell",
        "shell",
        "apply_patch",
        "tool_search",
        "programmatic_tool_calling",
    }
)
_HOSTED_PREFIXES = ("web_search", "computer")
"""Their names carry dates and `_preview`."""
KNOWN = ("function", "custom", "namespace", "mcp", "web_search", "computer", *sorted(_HOSTED))


def is_hosted(kind: object) -> bool:
    """True for a tool that OpenAI runs, and this server does not."""
    return isinstance(kind, str) and (kind in _HOSTED or kind.startswith(_HOSTED_PREFIXES))


def _hosted_name(kind: str) -> str:
    """The name without date and `_preview`."""
    return next((prefix for prefix in _HOSTED_PREFIXES if kind.startswith(prefix)), kind)


@dataclass(frozen=True, slots=True)
class Offer:
    """What the client knows of a function that the model sees."""

    kind: Kind
    name: str
    namespace: str | None = None
    """The namespace, or the label of the MCP server."""
    needs_approval: bool = False


@dataclass(frozen=True, slots=True)
class McpServer:
    """A tool of the type `mcp`: which tools of a server may be called, and which of them need approval."""

    label: str
    path: str
    allowed: frozenset[str] | None = None
    always: bool | frozenset[str] = True
    """True if every call needs approval, or the names of tools whose calls do."""
    never: frozenset[str] = frozenset()

    def offers(self, name: str) -> bool:
        return self.allowed is None or name in self.allowed

    def needs_approval(self, name: str) -> bool:
        if name in self.never:
            return False
        return self.always if isinstance(self.always, bool) else name in self.always


@dataclass(frozen=True, slots=True)
class Catalog:
    """All tools of a request. `functions` are what the model sees; `offers` has the meaning of each, by its name."""

    functions: tuple[dict[str, Any], ...] = ()
    offers: dict[str, Offer] = field(default_factory=dict)
    grammars: tuple[tuple[str, Grammar], ...] = ()
    servers: tuple[McpServer, ...] = ()
    left_out: tuple[str, ...] = ()
    """Types of hosted tools."""
    shown: tuple[dict[str, Any], ...] = ()
    """The tools as the client sent them."""

    def names(self, kind: Kind, name: str | None, namespace: str | None = None) -> list[str]:
        """The functions of this kind and name, as the model knows them. Without a namespace, those of all of them."""
        return [
            flat
            for flat, offer in self.offers.items()
            if offer.kind == kind
            and name in (None, offer.name, flat)
            and (namespace is None or namespace == offer.namespace)
        ]

    def with_server(self, server: McpServer, tools: Iterable[ServerTool]) -> Catalog:
        """Adds the tools of an MCP server."""
        functions, offers = list(self.functions), dict(self.offers)
        for tool in tools:
            if server.offers(tool.name):
                name = joined_name(server.label, tool.name)
                functions.append(function_tool(name, tool.description, tool.parameters, path=server.path))
                offers[name] = Offer("mcp", tool.name, server.label, server.needs_approval(tool.name))
        check_names(functions)
        return replace(self, functions=tuple(functions), offers=offers)


class _Reader:
    def __init__(self) -> None:
        self.functions: list[dict[str, Any]] = []
        self.offers: dict[str, Offer] = {}
        self.grammars: list[tuple[str, Grammar]] = []
        self.servers: list[McpServer] = []
        self.left_out: list[str] = []

    def add(self, tool: object, path: str) -> None:
        if not isinstance(tool, dict):
            raise BadRequest(f"{path} must be an object with a type.", param=path)
        kind = tool.get("type")
        parsers: dict[str, Callable[[dict[str, Any], str], None]] = {
            "function": self._function,
            "custom": self._custom,
            "namespace": self._namespace,
            "mcp": self._server,
        }
        if isinstance(kind, str) and kind in parsers:
            parsers[kind](tool, path)
        elif is_hosted(kind):
            self.left_out.append(_hosted_name(str(kind)))
        else:
            raise BadRequest(
                f"{path}.type is {str(kind)[:40]!r}, but must be one of {', '.join(KNOWN)}.", param=f"{path}.type"
            )

    def _function(self, tool: dict[str, Any], path: str, namespace: str | None = None, about: object = None) -> None:
        inner = tool.get("function")
        if "name" not in tool and isinstance(inner, dict):  # the form of the chat API
            tool, path = inner, f"{path}.function"
        name = _flat(namespace, tool.get("name"))
        description = tool.get("description") or about
        self.functions.append(function_tool(name, description, tool.get("parameters"), path=path))
        self.offers[str(name)] = Offer("function", str(tool["name"]), namespace)

    def _custom(self, tool: dict[str, Any], path: str, namespace: str | None = None, about: object = None) -> None:
        name = _flat(namespace, tool.get("name"))
        self.functions.append(custom_tool(name, tool.get("description") or about, path))
        self.offers[str(name)] = Offer("custom", str(tool["name"]), namespace)
        grammar = parse_format(tool.get("format"), f"{path}.format")
        if grammar is not None:
            self.grammars.append((str(name), grammar))

    def _namespace(self, tool: dict[str, Any], path: str) -> None:
        name, tools = tool.get("name"), tool.get("tools")
        if not isinstance(name, str) or not name:
            raise BadRequest(f"{path}.name must be a non-empty string.", param=f"{path}.name")
        if not isinstance(tools, list):
            raise BadRequest(f"{path}.tools must be a list of functions and custom tools.", param=f"{path}.tools")
        for index, inner in enumerate(tools):
            place = f"{path}.tools[{index}]"
            kind = inner.get("type", "function") if isinstance(inner, dict) else None
            if not isinstance(inner, dict) or kind not in ("function", "custom"):
                raise BadRequest(f"{place}.type must be function or custom.", param=f"{place}.type")
            add = self._function if kind == "function" else self._custom
            add(inner, place, name, tool.get("description"))

    def _server(self, tool: dict[str, Any], path: str) -> None:
        label = tool.get("server_label")
        if not isinstance(label, str) or not label:
            raise BadRequest(f"{path}.server_label must be a non-empty string.", param=f"{path}.server_label")
        allowed = _names(tool.get("allowed_tools"), f"{path}.allowed_tools")
        always, never = _approval(tool.get("require_approval"), f"{path}.require_approval")
        self.servers.append(McpServer(label, path, allowed, always, never))


def _flat(namespace: str | None, name: object) -> object:
    return joined_name(namespace, name) if isinstance(name, str) else name


def _names(value: object, path: str) -> frozenset[str] | None:
    """A list of names, or an object with one. None for all tools."""
    names = value.get("tool_names") if isinstance(value, dict) else value
    if names is None:
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise BadRequest(f"{path} must be a list of names, or an object with tool_names.", param=path)
    return frozenset(names)


def _approval(value: object, path: str) -> tuple[bool | frozenset[str], frozenset[str]]:
    """The tools whose calls need approval, and those whose calls do not. Without a word, all calls do."""
    if value in (None, "always", "never"):
        return value != "never", frozenset()
    if not isinstance(value, dict):
        raise BadRequest(f'{path} must be "always", "never" or an object with always and never.', param=path)
    always = _names(value.get("always"), f"{path}.always")
    never = _names(value.get("never"), f"{path}.never") or frozenset()
    return (always if always is not None and not never else True), never


def parse_tools(value: object, more: Sequence[tuple[object, str]] = ()) -> Catalog:
    """`more` are tools from input items, each with its path."""
    if not isinstance(value, list):
        raise BadRequest("tools must be a list.", param="tools")
    reader = _Reader()
    for tool, path in [*((tool, f"tools[{index}]") for index, tool in enumerate(value)), *more]:
        reader.add(tool, path)
    check_names(reader.functions)
    labels = [server.label for server in reader.servers]
    if len(set(labels)) < len(labels):
        raise BadRequest("tools has two MCP servers with one server_label. Labels must differ.", param="tools")
    return Catalog(
        tuple(reader.functions),
        reader.offers,
        tuple(reader.grammars),
        tuple(reader.servers),
        tuple(reader.left_out),
        tuple(tool for tool in value if isinstance(tool, dict)),
    )


def tools_of_items(items: Sequence[object], path: str = "input") -> list[tuple[object, str]]:
    """Tools that stand in the input, as items of the type `additional_tools`. Each comes with its path."""
    found: list[tuple[object, str]] = []
    for index, item in enumerate(items):
        if isinstance(item, dict) and item.get("type") == "additional_tools":
            tools = item.get("tools")
            if not isinstance(tools, list):
                raise BadRequest(f"{path}[{index}].tools must be a list.", param=f"{path}[{index}].tools")
            found += [(tool, f"{path}[{index}].tools[{number}]") for number, tool in enumerate(tools)]
    return found
