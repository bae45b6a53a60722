"""Tool-call formats of Llama 3.2 and 4 and LFM2: a Python list of calls, with or without markers.

[get_weather(city="Oslo"), get_time(zone="CET")]
<|tool_call_start|>[get_weather(city="Oslo")]<|tool_call_end|>
"""

from __future__ import annotations

import ast
import dataclasses
import re
from typing import Any

from millstream.text.tool_formats.format import (
    Block,
    CallSyntax,
    KeyedArguments,
    NotACall,
    Schemas,
    ToolCall,
    ToolFormat,
)
from millstream.text.tool_formats.json_calls import parse_json_calls, strip_markers

STARTS = ("<|tool_call_start|>", "<|python_start|>")
ENDS = ("<|tool_call_end|>", "<|python_end|>")
_JSON_LITERALS = {"true": True, "false": False, "null": None}
_MAX_LENGTH = 100_000
"""Characters that are parsed. The rest is cut off."""


def parse(source: str, schemas: Schemas) -> list[ToolCall]:
    body = strip_markers(source, STARTS, ENDS)
    if body.startswith(("{", "[{")):
        return parse_json_calls(body)
    calls = parse_python_calls(body if body.startswith("[") else f"[{body}]")
    if schemas and not source.lstrip().startswith(STARTS) and any(call.name not in schemas for call in calls):
        raise NotACall("the list names no known function")
    return calls


def parse_python_calls(text: str) -> list[ToolCall]:
    """Parses a list of calls with keyword arguments, using Python's own parser. Nothing is executed."""
    try:
        tree = ast.parse(text[:_MAX_LENGTH], mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            raise NotACall("expected a list of calls")
        return [_call(item) for item in tree.elts]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NotACall(str(error)) from error


def _call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args:
        raise NotACall("expected a call with keyword arguments only")
    values = {keyword.arg: _value(keyword.value) for keyword in node.keywords if keyword.arg is not None}
    if len(values) != len(node.keywords):
        raise NotACall("expected a call with keyword arguments only")
    return ToolCall(_name(node.func), values)


def _name(node: ast.expr) -> str:
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            return f"{_name(node.value)}.{node.attr}"
        case _:
            raise NotACall("expected a function name")


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant() if node.value is None or isinstance(node.value, str | int | float):
            return node.value
        case ast.Name() if node.id in _JSON_LITERALS:
            return _JSON_LITERALS[node.id]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List() | ast.Tuple():
            return [_value(item) for item in node.elts]
        case ast.Dict():
            return {_key(key): _value(value) for key, value in zip(node.keys, node.values, strict=True)}
        case _:
            raise NotACall("expected a literal value")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise NotACall("keys must be strings")


FORMAT = ToolFormat(
    name="pythonic",
    blocks=tuple(Block(start, (end,)) for start, end in zip(STARTS, ENDS, strict=True)),
    parse=parse,
    bare=re.compile(r"\s*\[\s*([A-Za-z_][\w.]*)\("),
    syntax=CallSyntax(
        "{name}(",
        ")",
        opening="[",
        between=", ",
        closing="]",
        arguments=KeyedArguments("{key}=", "", between=", ", quote='"'),
    ),
    template_hints=(("<|python_start|>",), ("func_name1(params_name1",)),
    token_hints=("<|python_start|>", "<|python_end|>"),
)
LFM2 = dataclasses.replace(
    FORMAT,
    name="lfm2",
    syntax=dataclasses.replace(FORMAT.syntax, opening=f"{STARTS[0]}[", closing=f"]{ENDS[0]}"),
    template_hints=((STARTS[0],), ("<|tool_list_start|>",)),
    token_hints=(STARTS[0], ENDS[0]),
)
