"""Reads grammars in llguidance's Lark dialect: their references to tokens, and their statements, so that one can become
a part of another grammar."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from millstream.exact_json import first_value
from millstream.text.grammars.json_escaped import CannotRewrite
from millstream.types import Grammar

Kind = Literal["name", "string", "regex", "number", "op"]

COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "FLOAT": r"[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_FLOAT": r"[+-]?(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "NUMBER": r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[a-zA-Z_][a-zA-Z0-9_]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
    "SQL_COMMENT": r"--[^\n]*",
}
"""Terminals that `%import common.NAME` brings, as regular expressions."""

_SKIPPED = r"""//[^\n]* | "(?:\\.|[^"\\\n])*" | /(?:\\.|[^/\\\n])+/"""
"""Comments, strings and regular expressions."""
_TOKEN_REFERENCE = re.compile(rf"""{_SKIPPED} | (?P<token> <\[[^\]\n]*\]> | <[^<>\s"]+> )""", re.VERBOSE)
_SCHEMA = re.compile(rf"{_SKIPPED} | (?P<json> %json\s* )", re.VERBOSE)

_TOKEN = re.compile(
    r"""(?P<skip>[ \t\f\r]+ | //[^\n]* | \#[^\n]*)
    | (?P<line>\n)
    | (?P<string>"(?:\\.|[^"\\\n])*"i?)
    | (?P<regex>/(?!/)(?:\\.|[^/\\\n])+/[a-z]*)
    | (?P<directive>%[a-z_]+)
    | (?P<name>[?!]*[A-Za-z_][A-Za-z0-9_]*)
    | (?P<number>[0-9]+)
    | (?P<op>\.\. | -> | [:|()*+?{}\[\],.~&])
    """,
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class Item:
    """A token of a rule's body. `text` is a name, an operator, the literal's text or the expression's pattern."""

    kind: Kind
    text: str
    flags: str = ""


Statements = dict[str, list[Item]]
"""Bodies by the names of rules and terminals."""


def names_tokens(grammar: Grammar) -> bool:
    """True if a grammar refers to tokens of the model, not to text alone."""
    if grammar.kind != "lark" or "<" not in grammar.source:
        return False
    return any(found["token"] for found in _TOKEN_REFERENCE.finditer(grammar.source))


def with_token_ids(grammar: Grammar, tokens: Mapping[str, int]) -> Grammar:
    """Replaces the names of tokens by their ids. A name that is none of these `tokens` stays."""
    return _with_references(grammar, lambda name: f"<[{tokens[name]}]>" if name in tokens else name)


def with_any_token(grammar: Grammar) -> Grammar:
    """Replaces all references to tokens by one to a token of llguidance's byte vocabulary."""
    return _with_references(grammar, lambda reference: "<[256]>")


def _with_references(grammar: Grammar, new: Callable[[str], str]) -> Grammar:
    if not names_tokens(grammar):
        return grammar
    source = _TOKEN_REFERENCE.sub(lambda found: new(found[0]) if found["token"] else found[0], grammar.source)
    return replace(grammar, source=source)


def json_schemas(source: str) -> list[object]:
    """Returns the schemas in a grammar, up to the first one that is not JSON."""
    schemas: list[object] = []
    position = 0
    while found := _SCHEMA.search(source, position):
        position = found.end()
        if found["json"]:
            try:
                value, position = first_value(source, position)
            except ValueError:
                break
            schemas.append(value)
    return schemas


def lark_statements(source: str) -> Statements:
    """Returns the rules and terminals of a grammar. Raises `CannotRewrite` if it uses more than these."""
    statements: Statements = {}
    for line in _logical_lines(_tokens(source)):
        if [item.text for item in line] == ["%llguidance", "{", "}"]:
            continue
        if line[0].text.startswith("%"):
            _import(line, statements)
            continue
        colon = next((place for place, item in enumerate(line) if item == Item("op", ":")), None)
        if line[0].kind != "name" or colon is None:
            raise CannotRewrite(f"a line that starts with {line[0].text!r}")
        if colon != 1 and not (colon == 3 and line[1].text == "." and line[2].kind == "number"):
            raise CannotRewrite(f"attributes or templates of {line[0].text!r}")
        statements[line[0].text.lstrip("?!")] = line[colon + 1 :]
    if "start" not in statements:
        raise CannotRewrite("a grammar without the rule start")
    return statements


def regex_statements(pattern: str) -> Statements:
    return {"start": [Item("regex", pattern)]}


def _tokens(source: str) -> list[Item | None]:
    """Returns the tokens; None for each end of a line."""
    tokens: list[Item | None] = []
    position = 0
    while position < len(source):
        found = _TOKEN.match(source, position)
        if found is None:
            raise CannotRewrite(f"{source[position : position + 20]!r}")
        position = found.end()
        if found.lastgroup == "line":
            tokens.append(None)
        elif found.lastgroup != "skip":
            tokens.append(_item(str(found.lastgroup), found[0]))
    return tokens


def _item(kind: str, text: str) -> Item:
    match kind:
        case "string":
            body, flags = (text[:-1], "i") if text.endswith("i") else (text, "")
            return Item("string", _string(body), flags)
        case "regex":
            pattern, _, flags = text[1:].rpartition("/")
            return Item("regex", pattern.replace("\\/", "/"), flags)
        case "name":
            return Item("name", text)
        case "number":
            return Item("number", text)
        case _:
            return Item("op", text)


def _string(text: str) -> str:
    try:
        return str(json.loads(text, strict=False))
    except ValueError:
        pass
    try:
        return str(ast.literal_eval(text))
    except (ValueError, SyntaxError):
        raise CannotRewrite(f"the string {text[:40]}") from None


def _logical_lines(tokens: list[Item | None]) -> list[list[Item]]:
    """Joins the lines of each statement: a new one begins with a directive, or a name and a colon."""
    lines: list[list[Item]] = []
    for number, token in enumerate(tokens):
        if token is None:
            continue
        first_of_line = number == 0 or tokens[number - 1] is None
        following = [item for item in tokens[number + 1 : number + 4] if item is not None]
        begins = token.kind == "name" and any(item.text in (":", ".", "[", "{") for item in following[:1])
        if not lines or (first_of_line and (token.text.startswith("%") or begins)):
            lines.append([])
        lines[-1].append(token)
    return lines


def _import(line: list[Item], statements: Statements) -> None:
    """Adds the terminals of `%import common.NAME`, `%import common (NAME, NAME)` or `%import common.NAME -> OTHER`."""
    names = [item.text for item in line[1:] if item.kind == "name"]
    if line[0].text != "%import":
        raise CannotRewrite(line[0].text)
    if names[:1] != ["common"]:
        raise CannotRewrite("an import from another grammar than common")
    alias = names.pop() if any(item.text == "->" for item in line) else None
    for name in names[1:]:
        if name not in COMMON:
            raise CannotRewrite(f"the import of common.{name}")
        statements.setdefault(alias or name, [Item("regex", COMMON[name])])
