"""Tool-call format of Llama 3: the answer is a JSON object, with or without a marker. `;` separates several calls.

{"name": "get_weather", "parameters": {"city": "Oslo"}}
<|python_tag|>{"name": "get_weather", "parameters": {"city": "Oslo"}}
"""

from __future__ import annotations

import re

from millstream.text.tool_formats.format import Block, CallSyntax, NotACall, Schemas, ToolCall, ToolFormat
from millstream.text.tool_formats.json_calls import parse_json_calls, strip_markers
from millstream.text.tool_formats.pythonic import parse_python_calls

START = "<|python_tag|>"
_OBJECT = r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"(?:name|function)"\s*:\s*"([^"\\]+)"\s*,\s*'
_HEAD = rf'[\s;,]*{_OBJECT}"(?:parameters|arguments)"\s*:\s*(?=\{{)'


def parse(source: str, schemas: Schemas) -> list[ToolCall]:
    body = strip_markers(source, [START], [])
    if not body.startswith(("{", "[")):
        # The model calls its built-in tools as get_weather.call(city="Oslo").
        calls = parse_python_calls(f"[{body}]")
        return [ToolCall(call.name.removesuffix(".call"), call.arguments) for call in calls]
    calls = parse_json_calls(body)
    if schemas and not source.lstrip().startswith(START) and any(call.name not in schemas for call in calls):
        raise NotACall("the object names no known function")
    return calls


FORMAT = ToolFormat(
    name="llama",
    blocks=(Block(START),),
    parse=parse,
    head=re.compile(rf"(?:\s*<\|python_tag\|>)?{_HEAD}"),
    bare=re.compile(rf"\s*{_OBJECT}"),
    syntax=CallSyntax('{"name": "{name}", "parameters": ', "}", between="; "),
    template_hints=((START,), ("<|start_header_id|>", '"parameters"')),
)
