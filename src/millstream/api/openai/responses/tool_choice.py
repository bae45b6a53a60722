"""Parses `tool_choice`: which of the tools the model may or must call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from millstream.api.openai.responses.tools import Catalog, is_hosted
from millstream.errors import BadRequest
from millstream.types import ToolUse

Mode = Literal["auto", "none", "required"]

_FORM = (
    'tool_choice must be none, auto, required, {"type": "function", "name": "..."}, '
    '{"type": "custom", "name": "..."}, {"type": "mcp", "server_label": "..."} or '
    '{"type": "allowed_tools", "mode": "auto", "tools": [...]}.'
)


@dataclass(frozen=True, slots=True)
class Choice:
    mode: Mode = "auto"
    only: tuple[tuple[str, str | None, str | None], ...] | None = None
    """Kind, name and namespace of the tools that may be called; None for all. A name of None: all of a namespace."""

    def tool_use(self, catalog: Catalog, *, parallel: bool) -> ToolUse | None:
        """Returns None if there are no tools. Raises `BadRequest` if the choice names a tool that is not there."""
        if not catalog.functions:
            if self.mode == "required":
                raise BadRequest("tool_choice requires a call, but there are no tools.", param="tool_choice")
            return None
        if self.only is None:
            return ToolUse(catalog.functions, self.mode, None, parallel, None, catalog.grammars)
        names = self.names(catalog)
        mode: Mode = self.mode if names else "none"
        single = names[0] if mode == "required" and len(names) == 1 else None
        allowed = None if single else frozenset(names)
        return ToolUse(catalog.functions, mode, single, parallel, allowed, catalog.grammars)

    def names(self, catalog: Catalog) -> list[str]:
        """The functions that may be called."""
        found: list[str] = []
        for kind, name, namespace in self.only or ():
            names = catalog.names(kind, name, namespace)  # type: ignore[arg-type]
            if not names:
                shown = f"the {kind} tool {(name or namespace or '')[:64]!r}"
                known = ", ".join(catalog.offers) or "none"
                raise BadRequest(
                    f"tool_choice names {shown}, which is not among the tools: {known}.", param="tool_choice"
                )
            found += names
        return list(dict.fromkeys(found))

    def check(self, catalog: Catalog) -> None:
        """Raises `BadRequest` if it names a tool that is not there. MCP servers are checked by their label only:
        their tools are not known yet."""
        labels = [server.label for server in catalog.servers]
        local = tuple(one for one in self.only or () if one[0] != "mcp")
        Choice(self.mode, local).names(catalog)
        for kind, _, label in self.only or ():
            if kind == "mcp" and label not in labels:
                raise BadRequest(
                    f"tool_choice names the MCP server {str(label)[:64]!r}, which is not among the tools.",
                    param="tool_choice",
                )
        if self.mode == "required" and not (self.only or catalog.functions or labels):
            raise BadRequest("tool_choice requires a call, but there are no tools.", param="tool_choice")


def parse_choice(value: object) -> Choice:
    match value:
        case None | "auto":
            return Choice()
        case "none" | "required":
            return Choice(value)
        case {"type": "allowed_tools", "tools": list(tools), **rest}:
            mode = rest.get("mode", "auto")
            if mode not in ("auto", "required"):
                raise BadRequest("tool_choice.mode must be auto or required.", param="tool_choice.mode")
            only = [_one(tool, f"tool_choice.tools[{index}]") for index, tool in enumerate(tools)]
            return Choice(mode, tuple(one for one in only if one is not None))
        case dict():
            one = _one(value, "tool_choice")
            return Choice() if one is None else Choice("required", (one,))
        case _:
            raise BadRequest(_FORM, param="tool_choice")


def _one(tool: object, path: str) -> tuple[str, str | None, str | None] | None:
    """Returns None for a hosted tool, which the model does not see."""
    match tool:
        case {"type": "function" | "custom" as kind, "name": str(name), **rest}:
            namespace = rest.get("namespace")
            return kind, name, namespace if isinstance(namespace, str) else None
        case {"type": "function", "function": {"name": str(name)}}:
            return "function", name, None
        case {"type": "mcp", "server_label": str(label), **rest}:
            tool_name = rest.get("name")
            return "mcp", tool_name if isinstance(tool_name, str) else None, label
        case {"type": kind} if is_hosted(kind):
            return None
        case _:
            raise BadRequest(_FORM if path == "tool_choice" else f"{path} must name a tool.", param=path)
