"""Tool-call format of GLM 4.5 to 4.7: a name, then pairs of key and value tags with untyped values.

<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>
"""

from __future__ import annotations

import re

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
from millstream.text.tool_formats.values import typed_call

START, END = "<tool_call>", "</tool_call>"
_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_NAME = re.compile(r"[\w.-]+")


def parse(source: str, schemas: Schemas) -> list[ToolCall]:
    body = strip_markers(source, [START], [END])
    if body.startswith(("{", "[")):
        return parse_json_calls(body)
    name, tag, _ = body.partition("<arg_key>")
    if not _NAME.fullmatch(name.strip()) or _PAIR.sub("", tag + body[len(name) + len(tag) :]).strip():
        raise NotACall("expected a function name and pairs of keys and values")
    return [typed_call(name, {key.strip(): value for key, value in _PAIR.findall(body)}, schemas)]


FORMAT = ToolFormat(
    name="glm",
    blocks=(Block(START, (END,)),),
    parse=parse,
    inner_markers=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    stop_tokens=("<|observation|>",),
    syntax=CallSyntax(
        f"{START}{{name}}",
        END,
        arguments=KeyedArguments("<arg_key>{key}</arg_key><arg_value>", "</arg_value>"),
    ),
    template_hints=((START, "<arg_key>"),),
)
