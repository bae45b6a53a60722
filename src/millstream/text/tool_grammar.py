"""Builds grammars that force a tool call, in llguidance's Lark dialect, from the syntax of a tool format.

A marker that is a single added token is referenced by its token id. As text it would never match: the tokenizer
encodes it as that one token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from millstream.text.grammar_limits import MAX_TOOL_BYTES, check_schema
from millstream.text.tool_formats.format import KeyedArguments, ReasoningMarkers, ToolFormat
from millstream.types import Grammar, ToolUse

MAX_CALLS = 8
"""Most calls in one answer that is forced to call. A weak model would otherwise never end its list."""

_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""If white space of any length were allowed, a model could write it forever."""


def tool_grammar(
    tool_format: ToolFormat,
    use: ToolUse,
    tokens: Mapping[str, int],
    *,
    reasoning: ReasoningMarkers | None = None,
    in_reasoning: bool = False,
) -> Grammar:
    """Returns a grammar of answers that call at least one tool. Raises `BadRequest` if a schema is too large.

    `tokens` maps the tokenizer's added tokens to their ids. With `reasoning`, reasoning may precede the calls;
    `in_reasoning`: it has begun already.
    """
    for tool in use.tools:
        check_schema(tool["function"].get("parameters") or {}, "tools", max_bytes=MAX_TOOL_BYTES)
    writer = _RuleWriter(tokens)
    chosen = [tool["function"] for tool in use.tools if use.name in (None, tool["function"]["name"])]
    syntax = tool_format.syntax
    calls = [
        writer.sequence(
            writer.text(syntax.before.replace("{name}", function["name"])),
            writer.arguments(syntax.arguments, function.get("parameters") or {}),
            writer.text(syntax.after),
        )
        for function in chosen
    ]
    call = writer.rule("call", " | ".join(calls))
    many = syntax.many and use.parallel and use.name is None
    more = f"({writer.sequence(writer.text(syntax.between), call)}){{0,{MAX_CALLS - 1}}}" if many else ""
    answer = writer.sequence(writer.text(syntax.opening), call, more, writer.text(syntax.closing))
    if reasoning is not None:
        answer = writer.sequence(writer.reasoning(reasoning, opened=in_reasoning), answer)
    return Grammar("lark", "\n".join([f"start: {answer}", *writer.rules]))


class _RuleWriter:
    """Builds rules, each under a unique name."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self.rules: list[str] = []
        self._tokens = tokens
        names = sorted((name for name in tokens if name), key=len, reverse=True)  # the longest match first
        self._split = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None

    def rule(self, kind: str, body: str, options: str = "") -> str:
        name = f"{kind}_{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name

    def sequence(self, *parts: str) -> str:
        return " ".join(part for part in parts if part) or '""'

    def text(self, text: str) -> str:
        """Matches exactly this text."""
        pieces = self._split.split(text) if self._split else [text]
        return " ".join(self._piece(piece) for piece in pieces if piece)

    def _piece(self, piece: str) -> str:
        number = self._tokens.get(piece)
        return json.dumps(piece, ensure_ascii=False) if number is None else f"<[{number}]>"

    def until(self, end: str) -> str:
        """Matches any text up to and including `end`."""
        first = self._split.match(end) if self._split else None
        if first is not None:
            return self.sequence("/(.|\\n)*/", self.text(end))
        return self.rule("free", "/(.|\\n)*/", f"[suffix={json.dumps(end, ensure_ascii=False)}]")

    def reasoning(self, markers: ReasoningMarkers, *, opened: bool) -> str:
        body = self.sequence(self.until(markers.closes[0]), self.text(markers.after), "/\\n{0,2}/")
        if opened:
            return body
        return f"({self.sequence(self.text(markers.opens[0]), body)})?"

    def arguments(self, keyed: KeyedArguments | None, schema: Mapping[str, Any]) -> str:
        if keyed is None:
            return self.json({"type": "object", **schema})
        properties = schema.get("properties") or {}
        required = set(schema.get("required") or ())
        items = [
            (self._argument(keyed, key, _with_definitions(value, schema)), key in required)
            for key, value in properties.items()
        ]
        return self._ordered(items, keyed.between) if items else ""

    def json(self, schema: Mapping[str, Any]) -> str:
        return self.rule("value", "%json " + json.dumps({**schema, "x-guidance": _COMPACT}, ensure_ascii=False))

    def _argument(self, keyed: KeyedArguments, key: str, schema: Mapping[str, Any]) -> str:
        before = self.text(keyed.before.replace("{key}", key))
        choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if not _is_string(schema, choices) or keyed.quote == '"':
            return self.sequence(before, self.json(schema), self.text(keyed.after))
        opening, closing = self.text(keyed.quote), keyed.quote + keyed.after
        if choices is None:
            return self.sequence(before, opening, self.until(closing))
        options = " | ".join(self.text(str(choice)) for choice in choices)
        return self.sequence(before, opening, f"({options})", self.text(closing))

    def _ordered(self, items: Sequence[tuple[str, bool]], between: str) -> str:
        """Matches arguments in their order, separated by `between`. Those that are not required may be left out."""
        separator = self.text(between)
        later = ""
        first = ""
        for item, required in reversed(items):
            rest, start = later, first
            later = self.sequence(separator, item, rest)
            first = self.sequence(item, rest)
            if not required:
                later = self.rule("more", f"{later} | {rest or chr(34) * 2}")
                first = self.rule("first", f"{first} | {start or chr(34) * 2}")
        return first


def _is_string(schema: Mapping[str, Any], choices: list[Any] | None) -> bool:
    if choices is not None:
        return all(isinstance(choice, str) for choice in choices)
    return schema.get("type") == "string"


def _with_definitions(schema: object, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Adds the definitions of the root schema: references in a property point there."""
    definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
    return {**(schema if isinstance(schema, Mapping) else {}), **definitions}
