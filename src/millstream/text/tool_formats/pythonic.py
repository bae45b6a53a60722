"""Llama 3.2 and 4, LFM2: a Python list of calls, with or without markers around it.

[get_weather(city="Oslo"), get_time(zone="CET")]
<|tool_call_start|>[get_weather(city="Oslo")]<|tool_call_end|>
"""

from __future__ import annotations

import ast
import dataclasses
import re
from typing import Any

from millstream.text.tool_formats.format import Block, Keyed, NotACall, Schemas, ToolCall, ToolFormat, Written
from millstream.text.tool_formats.json_calls import inside, read_calls

STARTS = ("<|tool_call_start|>", "<|python_start|>")
ENDS = ("<|tool_call_end|>", "<|python_end|>")
_JSON_WORDS = {"true": True, "false": False, "null": None}
_LONGEST = 100_000


def parse(source: str, schemas: Schemas) -> list[ToolCall]:
    body = inside(source, STARTS, ENDS)
    if body.startswith(("{", "[{")):
        return read_calls(body)
    calls = read_python(body if body.startswith("[") else f"[{body}]")
    if schemas and not source.lstrip().startswith(STARTS) and any(call.name not in schemas for call in calls):
        raise NotACall("a list of other things")
    return calls


def read_python(text: str) -> list[ToolCall]:
    """A list of calls with named arguments, read as Python's own grammar has it and never run."""
    try:
        tree = ast.parse(text[:_LONGEST], mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            raise NotACall("not a list of calls")
        return [_call(item) for item in tree.elts]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NotACall(str(error)) from error


def _call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args:
        raise NotACall("not a call with named arguments")
    values = {keyword.arg: _value(keyword.value) for keyword in node.keywords if keyword.arg is not None}
    if len(values) != len(node.keywords):
        raise NotACall("not a call with named arguments")
    return ToolCall(_name(node.func), values)


def _name(node: ast.expr) -> str:
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            return f"{_name(node.value)}.{node.attr}"
        case _:
            raise NotACall("not a name")


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant() if node.value is None or isinstance(node.value, str | int | float):
            return node.value
        case ast.Name() if node.id in _JSON_WORDS:
            return _JSON_WORDS[node.id]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List() | ast.Tuple():
            return [_value(item) for item in node.elts]
        case ast.Dict():
            return {_key(key): _value(value) for key, value in zip(node.keys, node.values, strict=True)}
        case _:
            raise NotACall("not a plain value")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise NotACall("a key that is no text")


FORMAT = ToolFormat(
    name="pythonic",
    blocks=tuple(Block(start, (end,)) for start, end in zip(STARTS, ENDS, strict=True)),
    parse=parse,
    bare=re.compile(r"\s*\[\s*([A-Za-z_][\w.]*)\("),
    written=Written(
        "{name}(", ")", opening="[", between=", ", closing="]", arguments=Keyed("{key}=", "", between=", ", quote='"')
    ),
    signs=(("<|python_start|>",), ("func_name1(params_name1",)),
    tokens=("<|python_start|>", "<|python_end|>"),
)
LFM2 = dataclasses.replace(
    FORMAT,
    name="lfm2",
    written=dataclasses.replace(FORMAT.written, opening=f"{STARTS[0]}[", closing=f"]{ENDS[0]}"),
    signs=((STARTS[0],), ("<|tool_list_start|>",)),
    tokens=(STARTS[0], ENDS[0]),
)
