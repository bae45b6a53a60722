"""Grammars that force a call: llguidance's Lark dialect, made from how a format writes calls.

Markers that are tokens of their own are named by their number. As text they could never be matched: the tokenizer gives
one token for them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from millstream.text.grammar_limits import MAX_TOOL_BYTES, check_schema
from millstream.text.tool_formats.format import Keyed, ReasoningMarks, ToolFormat
from millstream.types import Grammar, ToolUse

MOST_CALLS = 8
"""In one answer that must call. A weak model would otherwise never end its list."""

_TIGHT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Blanks of any length would let a model go on for ever."""


def tool_grammar(
    form: ToolFormat,
    use: ToolUse,
    tokens: Mapping[str, int],
    *,
    reasoning: ReasoningMarks | None = None,
    thinking: bool = False,
) -> Grammar:
    """`tokens`: names and numbers of the tokenizer's added tokens. `reasoning`: thoughts may come before the calls;
    `thinking`: they have begun already."""
    for tool in use.tools:
        check_schema(tool["function"].get("parameters") or {}, "tools", most_bytes=MAX_TOOL_BYTES)
    writer = _Rules(tokens)
    chosen = [tool["function"] for tool in use.tools if use.name in (None, tool["function"]["name"])]
    written = form.written
    calls = [
        writer.joined(
            writer.text(written.before.replace("{name}", function["name"])),
            writer.arguments(written.arguments, function.get("parameters") or {}),
            writer.text(written.after),
        )
        for function in chosen
    ]
    call = writer.rule("call", " | ".join(calls))
    many = written.many and use.parallel and use.name is None
    more = f"({writer.joined(writer.text(written.between), call)}){{0,{MOST_CALLS - 1}}}" if many else ""
    answer = writer.joined(writer.text(written.opening), call, more, writer.text(written.closing))
    if reasoning is not None:
        answer = writer.joined(writer.thoughts(reasoning, opened=thinking), answer)
    return Grammar("lark", "\n".join([f"start: {answer}", *writer.rules]))


class _Rules:
    """Collects rules under names of their own."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self.rules: list[str] = []
        self._tokens = tokens
        names = sorted((name for name in tokens if name), key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None

    def rule(self, kind: str, body: str, options: str = "") -> str:
        name = f"{kind}_{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name

    def joined(self, *parts: str) -> str:
        return " ".join(part for part in parts if part) or '""'

    def text(self, text: str) -> str:
        """A text that must stand as it is."""
        pieces = self._split.split(text) if self._split else [text]
        return " ".join(self._piece(piece) for piece in pieces if piece)

    def _piece(self, piece: str) -> str:
        number = self._tokens.get(piece)
        return json.dumps(piece, ensure_ascii=False) if number is None else f"<[{number}]>"

    def until(self, end: str) -> str:
        """Any text, and then `end`."""
        first = self._split.match(end) if self._split else None
        if first is not None:
            return self.joined("/(.|\\n)*/", self.text(end))
        return self.rule("free", "/(.|\\n)*/", f"[suffix={json.dumps(end, ensure_ascii=False)}]")

    def thoughts(self, marks: ReasoningMarks, *, opened: bool) -> str:
        body = self.joined(self.until(marks.closes[0]), self.text(marks.after), "/\\n{0,2}/")
        if opened:
            return body
        return f"({self.joined(self.text(marks.opens[0]), body)})?"

    def arguments(self, keyed: Keyed | None, schema: Mapping[str, Any]) -> str:
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
        return self.rule("value", "%json " + json.dumps({**schema, "x-guidance": _TIGHT}, ensure_ascii=False))

    def _argument(self, keyed: Keyed, key: str, schema: Mapping[str, Any]) -> str:
        before = self.text(keyed.before.replace("{key}", key))
        choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if not _is_text(schema, choices) or keyed.quote == '"':
            return self.joined(before, self.json(schema), self.text(keyed.after))
        opening, closing = self.text(keyed.quote), keyed.quote + keyed.after
        if choices is None:
            return self.joined(before, opening, self.until(closing))
        listed = " | ".join(self.text(str(choice)) for choice in choices)
        return self.joined(before, opening, f"({listed})", self.text(closing))

    def _ordered(self, items: Sequence[tuple[str, bool]], between: str) -> str:
        """Arguments in their order, those left out that may be; with something between those that are there."""
        separator = self.text(between)
        later = ""
        first = ""
        for item, required in reversed(items):
            rest, start = later, first
            later = self.joined(separator, item, rest)
            first = self.joined(item, rest)
            if not required:
                later = self.rule("more", f"{later} | {rest or chr(34) * 2}")
                first = self.rule("first", f"{first} | {start or chr(34) * 2}")
        return first


def _is_text(schema: Mapping[str, Any], choices: list[Any] | None) -> bool:
    if choices is not None:
        return all(isinstance(choice, str) for choice in choices)
    return schema.get("type") == "string"


def _with_definitions(schema: object, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """References point to the root of the schema, which is left behind here."""
    kept = {name: root[name] for name in ("$defs", "definitions") if name in root}
    return {**(schema if isinstance(schema, Mapping) else {}), **kept}
