"""Grammars that a stranger might send: large, deep, slow or senseless. Each with what must come of it."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from millstream.types import Grammar


class Nasty(NamedTuple):
    name: str
    grammar: Grammar
    refused: str | None = None
    """Words of the refusal. None: it is served."""


def optional(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(count)}}


def chained(length: int, **keywords: Any) -> dict[str, Any]:
    """Definitions of which each refers to the next: flat as JSON, deep for whoever follows them."""
    links = {f"d{n}": {"type": "array", "items": {"$ref": f"#/$defs/d{n + 1}"}, **keywords} for n in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{length}": {"type": "string"}}}


def _schema(name: str, schema: object, refused: str | None = None) -> Nasty:
    return Nasty(name, Grammar("json_schema", json.dumps(schema)), refused)


def _doubled(name: str, depth: int) -> str:
    rules = "\n".join(f"{name}{n}: {name}{n + 1} {name}{n + 1}" for n in range(depth))
    return f'start: {name}0\n{rules}\n{name}{depth}: "a"'


def _tool(number: int) -> dict[str, Any]:
    arguments = {**optional(20), "additionalProperties": False}
    properties = {"name": {"const": f"tool{number}"}, "arguments": arguments}
    return {"type": "object", "properties": properties, "required": ["name", "arguments"]}


_WORDS = [f"option number {number}" for number in range(10_000)]
_MULTIPLE = '{"type": "integer", "multipleOf": 999983}'
_SLOW = "takes too long to compile"
_DEEP = "nested too deeply"
_NOTHING = "no output can match"
_COMPLEX = "too complex"

NASTY = [
    _schema("refers to itself", {"$ref": "#"}, _NOTHING),
    _schema("a circle of two", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#"}}}, _NOTHING),
    _schema("all of itself", {"allOf": [{"$ref": "#"}]}, _NOTHING),
    _schema("any of itself", {"anyOf": [{"$ref": "#"}, {"type": "null"}]}),
    _schema("a list of itself", {"type": "array", "items": {"$ref": "#"}}),
    _schema("a chain of 3000", chained(3_000), _DEEP),
    _schema("a chain of 20", chained(20)),
    _schema("500 optional properties", optional(500)),
    _schema("an enum of 5000", {"enum": _WORDS[:5_000]}),
    _schema("100 tools of 20 properties", {"anyOf": [_tool(number) for number in range(100)]}),
    Nasty("a huge multiple", Grammar("json_schema", _MULTIPLE), _SLOW),
    _schema("50 patterns at once", {"allOf": [{"type": "string", "pattern": f"a{{{n},}}"} for n in range(50)]}, _SLOW),
    _schema("a long constant", {"const": "x" * 60_000}, "too slow to enforce"),
    _schema("a billion items", {"type": "array", "items": {"type": "integer"}, "maxItems": 10**9}),
    _schema("a billion characters", {"type": "string", "minLength": 10**9}),
    Nasty("10000 choices", Grammar("lark", "start: T\nT: " + " | ".join(map(json.dumps, _WORDS)))),
    Nasty("6000 rules", Grammar("lark", "start: " + " | ".join(map(json.dumps, _WORDS[:6_000]))), _COMPLEX),
    Nasty("a chain of rules", Grammar("lark", "start: r0\n" + "".join(f"r{n}: r{n + 1}\n" for n in range(9_000))
        + 'r9000: "a"'), _DEEP),
    Nasty("left recursion", Grammar("lark", 'start: start "a" | "b"')),
    Nasty("ambiguity", Grammar("lark", 'start: start start | "a" | ""')),
    Nasty("doubled rules", Grammar("lark", _doubled("r", 30)), _COMPLEX),
    Nasty("long terminals", Grammar("lark", _doubled("R", 16)), "too slow to enforce"),
    Nasty("brackets", Grammar("lark", "start: " + "(" * 5_000 + '"a"' + ")" * 5_000), "too deeply nested"),
    Nasty("a tool with a token", Grammar("lark", 'start: <[151657]> "<|a|>" /<b>/ <|call|> // <|x|>')),
    Nasty("slow behind a token", Grammar("lark", 'start: <|call|> %json ' + _MULTIPLE), _SLOW),
    Nasty("nested GBNF", Grammar("gbnf", "root ::= " + "(" * 3_000 + '"a"' + ")" * 3_000), "GBNF"),
    Nasty("groups of an expression", Grammar("regex", "(" * 5_000 + "a" + ")" * 5_000), "cannot be compiled"),
    Nasty("many states", Grammar("regex", ".*a.{200}b")),
    Nasty("repeats of repeats", Grammar("regex", "((((a{1,50}b?){1,50}c?){1,50}d?){1,50})")),
    Nasty("a million letters", Grammar("regex", ".{1,1000000}")),
]  # fmt: skip
