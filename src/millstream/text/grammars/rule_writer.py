"""Writes the rules of a grammar in llguidance's Lark dialect: markers, reasoning, and arguments that match a schema.

A marker that is a single added token is referenced by its token id: no text of a grammar is that token. What a client
wrote (the names of functions and parameters, the values of an enumeration) is text, even if it spells a marker.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from millstream.exact_json import dumps_text
from millstream.text.grammars.tool_input import input_rules, literal, symbol
from millstream.text.tool_formats.format import KeyedArguments, ReasoningMarkers
from millstream.types import INPUT_PARAMETER, Grammar

_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""If white space of any length were allowed, a model could write it forever."""

FREE = "/(.|\\n)*/"
"""Any text. It matches no added token."""


class RuleWriter:
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
        """Matches exactly this text of the tool format. Markers in it are tokens."""
        pieces = self._split.split(text) if self._split else [text]
        return " ".join(self._piece(piece) for piece in pieces if piece)

    def named(self, text: str, placeholder: str, name: str) -> str:
        """Matches a text of the tool format with a client's name in the place of `placeholder`."""
        before, found, after = text.partition(placeholder)
        return self.sequence(self.text(before), literal(name) if found else "", self.text(after))

    def _piece(self, piece: str) -> str:
        number = self._tokens.get(piece)
        return literal(piece) if number is None else f"<[{number}]>"

    def is_simple(self, text: str) -> bool:
        """True if `text` is one added token, or contains none."""
        return text in self._tokens or self._split is None or not self._split.search(text)

    def without(self, marker: str) -> str:
        """Matches any text that does not contain `marker`."""
        inner = "".join(f"\\x{{{ord(char):X}}}" for char in marker)
        return self.rule("WITHOUT", f"{FREE} & ~/(?s:.*){inner}(?s:.*)/")

    def until(self, end: str) -> str:
        """Matches any text up to and including `end`."""
        first = self._split.match(end) if self._split else None
        if first is not None:
            return self.sequence(FREE, self.text(end))
        return self.rule("free", FREE, f"[suffix={literal(end)}]")

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

    def input(self, keyed: KeyedArguments | None, grammar: Grammar) -> str:
        """Matches the arguments of a tool that takes free text. Raises `CannotRewrite`."""
        if keyed is None:
            return self.sequence(self.text(f'{{"{INPUT_PARAMETER}": "'), self._input(grammar, '"', escaped=True), '"}"')
        before = self.text(keyed.before.replace("{key}", INPUT_PARAMETER) + keyed.quote)
        if keyed.quote == '"':
            return self.sequence(before, self._input(grammar, '"', escaped=True), self.text(keyed.after))
        closing = keyed.quote + keyed.after
        end = self._split.split(closing, maxsplit=1)[0] if self._split else closing
        rest = closing[len(end) :]
        value = self._input(grammar, end, escaped=False, hidden_end=bool(rest))
        return self.sequence(before, value, self.text(rest))

    def _input(self, grammar: Grammar, end: str, *, escaped: bool, hidden_end: bool = False) -> str:
        rules = input_rules(grammar, f"input_{len(self.rules)}", end=end, escaped=escaped, hidden_end=hidden_end)
        self.rules += rules
        return symbol(rules)

    def free_arguments(self, keyed: KeyedArguments | None, after: str, inner: Sequence[str]) -> str:
        """Matches any arguments, up to and including `after`. `inner`: markers that arguments may contain."""
        if keyed is None:
            return self.sequence(self.rule("value", '%json {"type": "object"}'), self.text(after))
        found = self._split.search(after) if self._split else None
        end = self.sequence(FREE, self.text(after[found.start() :])) if found else self.until(after)
        tokens = " | ".join(self.text(marker) for marker in inner if marker in self._tokens)
        return self.sequence(f"({FREE} ({tokens}))*" if tokens else "", end)

    def json(self, schema: Mapping[str, Any]) -> str:
        return self.rule("value", "%json " + dumps_text({**schema, "x-guidance": _COMPACT}))

    def _argument(self, keyed: KeyedArguments, key: str, schema: Mapping[str, Any]) -> str:
        before = self.named(keyed.before, "{key}", key)
        choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if not _is_string(schema, choices) or keyed.quote == '"':
            return self.sequence(before, self.json(schema), self.text(keyed.after))
        opening, closing = self.text(keyed.quote), keyed.quote + keyed.after
        if choices is None:
            return self.sequence(before, opening, self.until(closing))
        options = " | ".join(literal(str(choice)) for choice in choices)
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
