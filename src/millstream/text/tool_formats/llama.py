"""Llama 3: the answer itself is a JSON object, with or without a marker before it. Several are divided by `;`.

{"name": "get_weather", "parameters": {"city": "Oslo"}}
<|python_tag|>{"name": "get_weather", "parameters": {"city": "Oslo"}}
"""

from __future__ import annotations

import re

from millstream.text.tool_formats.format import Block, NotACall, Schemas, ToolCall, ToolFormat, Written
from millstream.text.tool_formats.json_calls import inside, read_calls
from millstream.text.tool_formats.pythonic import read_python

START = "<|python_tag|>"
_OBJECT = r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"(?:name|function)"\s*:\s*"([^"\\]+)"\s*,\s*'
_HEAD = rf'[\s;,]*{_OBJECT}"(?:parameters|arguments)"\s*:\s*(?=\{{)'


def parse(source: str, schemas: Schemas) -> list[ToolCall]:
    body = inside(source, [START], [])
    if not body.startswith(("{", "[")):
        # Tools that the model was trained with are called as get_weather.call(city="Oslo").
        calls = read_python(f"[{body}]")
        return [ToolCall(call.name.removesuffix(".call"), call.arguments) for call in calls]
    calls = read_calls(body)
    if schemas and not source.lstrip().startswith(START) and any(call.name not in schemas for call in calls):
        raise NotACall("an object that names no function")
    return calls


FORMAT = ToolFormat(
    name="llama",
    blocks=(Block(START),),
    parse=parse,
    head=re.compile(rf"(?:\s*<\|python_tag\|>)?{_HEAD}"),
    bare=re.compile(rf"\s*{_OBJECT}"),
    written=Written('{"name": "{name}", "parameters": ', "}", between="; "),
    signs=((START,), ("<|start_header_id|>", '"parameters"')),
)
