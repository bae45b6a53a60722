"""Turns the grammar of a tool's free-text input into rules of the grammar that a whole answer must match.

A grammar without recursion becomes a single terminal. llguidance's lexer is greedy and does not go back: a terminal
such as `/(.|\\n)*/` would swallow the marker that ends the input. As part of one terminal it cannot. A recursive
grammar stays as it is, where no terminal of it can swallow the end.
"""

from __future__ import annotations

import json
import re
from graphlib import CycleError, TopologicalSorter

from millstream.text.grammars.json_escaped import (
    CannotRewrite,
    can_match,
    escaped_range,
    escaped_regex,
    escaped_text,
    parsed,
)
from millstream.text.grammars.lark import Item, Statements, lark_statements, regex_statements
from millstream.types import Grammar

MAX_BYTES = 32_768
"""Bytes of one grammar's source: it is rewritten in Python."""
MAX_RULES = 262_144
"""Characters of the result. `.` becomes an expression of 250 characters: it names each escape sequence."""

_ANY = "(?s:.*)"
_OPERATORS = frozenset("|()*+?&{},")


def input_rules(grammar: Grammar, name: str, *, end: str, escaped: bool, hidden_end: bool = False) -> list[str]:
    """Returns rules; the first, `NAME` or `name`, matches the input and the text `end` after it.

    `escaped`: the input is written inside a JSON string. `hidden_end`: a special token follows `end`, so nothing of the
    input can be mistaken for it. Raises `CannotRewrite` if the grammar uses what cannot become a part of another.
    """
    check_input_size(grammar)
    if grammar.kind not in ("lark", "regex"):
        raise CannotRewrite(f"a grammar of the kind {grammar.kind}")
    is_regex = grammar.kind == "regex"
    statements = regex_statements(grammar.source) if is_regex else lark_statements(grammar.source)
    order = _reachable(statements)
    is_plain = not _is_recursive(statements, order)
    body = "{}"
    if not escaped and end.strip() and not hidden_end:
        if is_plain:
            body = f"({{}} & ~/{_ANY}{_regex_text(end.strip())}{_ANY}/)"
        else:
            _check_end(statements, order, end)
    return _Writer(statements, order, name, escaped, terminals=is_plain).rules(literal(end), body)


def check_input_size(grammar: Grammar) -> None:
    """Raises `CannotRewrite` if a grammar is too large to be rewritten."""
    if len(grammar.source.encode(errors="replace")) > MAX_BYTES:
        raise CannotRewrite(f"more than {MAX_BYTES} bytes")


def symbol(rules: list[str]) -> str:
    """Returns the name of the first of some rules."""
    return rules[0].partition(":")[0]


def _reachable(statements: Statements) -> list[str]:
    """Returns the rules and terminals that `start` needs, itself first."""
    order = ["start"]
    seen = {"start"}
    for name in order:
        for item in _references(statements, name):
            if item not in statements:
                raise CannotRewrite(f"{item}, which the grammar does not define")
            if item not in seen:
                seen.add(item)
                order.append(item)
    return order


def _references(statements: Statements, name: str) -> list[str]:
    body = statements[name]
    return [
        item.text
        for place, item in enumerate(body)
        if item.kind == "name" and not (place and body[place - 1] == Item("op", "->"))
    ]


def _is_recursive(statements: Statements, names: list[str]) -> bool:
    try:
        TopologicalSorter({name: _references(statements, name) for name in names}).prepare()
    except CycleError:
        return True
    return False


def _check_end(statements: Statements, names: list[str], end: str) -> None:
    for item in (item for name in names for item in statements[name] if item.kind == "regex"):
        tree = parsed(item.text, item.flags)
        if can_match(tree, ord(end[0]), tree.state.flags):
            raise CannotRewrite(f"recursion and /{item.text[:100]}/, which can match {end[0]!r}")


def literal(text: str) -> str:
    """Matches exactly this text, and no token whose name it may be."""
    return json.dumps(text, ensure_ascii=False)


def _regex_text(text: str) -> str:
    return "".join(char if char.isalnum() and char.isascii() else f"\\x{{{ord(char):X}}}" for char in text)


class _Writer:
    """Writes statements under new names."""

    def __init__(self, statements: Statements, names: list[str], name: str, escaped: bool, *, terminals: bool) -> None:
        self._statements = statements
        self._main = name.upper() if terminals else name.lower()
        self._names = {
            old: f"{name}_{number}".upper()
            if terminals or old.lstrip("_")[:1].isupper()
            else f"{name}_{number}".lower()
            for number, old in enumerate(names)
        }
        self._escaped = escaped
        self._size = 0

    def rules(self, end: str, body: str = "{}") -> list[str]:
        start = body.replace("{}", self._names["start"])
        return [
            f"{self._main}: {start} {end}",
            *(f"{new}: {self._body(self._statements[old])}" for old, new in self._names.items()),
        ]

    def _body(self, items: list[Item]) -> str:
        written: list[str] = []
        place = 0
        while place < len(items):
            text, used = self._next(items, place)
            if text in ("|", ")", ")?") and (not written or written[-1] in ("|", "(")):
                written.append('""')
            written.append(text)
            place += used
            self._size += len(text)
            if self._size > MAX_RULES:
                raise CannotRewrite("too many or too long expressions")
        if not written or written[-1] == "|":
            written.append('""')
        return " ".join(text for text in written if text)

    def _next(self, items: list[Item], place: int) -> tuple[str, int]:
        """Returns the text of the next token, and how many tokens it stands for."""
        item = items[place]
        following = [other.text for other in items[place + 1 : place + 4]]
        if item.kind == "string" and following[:1] == [".."] and len(following) > 1:
            return self._range(item.text, following[1]), 3
        if item.kind == "string":
            return self._string(item), 1
        if item.kind == "regex":
            return self._regex(item.text, item.flags), 1
        if item.kind == "name":
            return self._names[item.text], 1
        if item.text == "->":
            return "", 2
        if item.text == "~" and place + 1 < len(items) and items[place + 1].kind == "number":
            is_range = following[1:2] == [".."] and len(following) > 2
            return (f"{{{following[0]},{following[2]}}}", 4) if is_range else (f"{{{following[0]}}}", 2)
        if item.text in "[]":
            return "(" if item.text == "[" else ")?", 1
        if item.kind == "number" or item.text in _OPERATORS:
            return item.text, 1
        raise CannotRewrite(f"{item.text!r}")

    def _string(self, item: Item) -> str:
        if item.flags:
            return self._regex(re.escape(item.text), item.flags)
        return literal(escaped_text(item.text) if self._escaped else item.text)

    def _regex(self, pattern: str, flags: str) -> str:
        if self._escaped:
            return f"/{escaped_regex(pattern, flags)}/"
        shown = pattern.replace("\\/", "/").replace("/", "\\/").replace("\n", "\\n")
        return f"/{shown}/{flags}"

    def _range(self, first: str, last: str) -> str:
        if len(first) != 1 or len(last) != 1:
            raise CannotRewrite("a range of more than characters")
        if self._escaped:
            return f"/{escaped_range(first, last)}/"
        return f"/[{_regex_text(first)}-{_regex_text(last)}]/"
