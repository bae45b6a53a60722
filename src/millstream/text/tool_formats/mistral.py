"""Tool-call formats of Mistral: a JSON list after a marker, and since 2025 a name and its arguments.

[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo"}, "id": "a1b2c3d4e"}]
[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}
"""

from __future__ import annotations

import dataclasses
import re

from millstream.text.tool_formats.format import Block, CallSyntax, NotACall, Schemas, ToolCall, ToolFormat
from millstream.text.tool_formats.json_calls import CALL_HEAD, parse_json_calls, strip_markers
from millstream.text.tool_formats.lenient_json import LenientJsonReader
from millstream.text.tool_formats.values import make_call

START, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_HEADED = r"([\w.-]+)\s*(?:\[CALL_ID\]\w+)?\s*\[ARGS\]\s*"
_HEADED_CALL = re.compile(rf"\s*(?:\[TOOL_CALLS\])?\s*{_HEADED}")


def parse(source: str, schemas: Schemas) -> list[ToolCall]:
    body = strip_markers(source, [START], [])
    if ARGS not in body:
        return parse_json_calls(body)
    calls: list[ToolCall] = []
    position = 0
    while position < len(body):
        head = _HEADED_CALL.match(body, position)
        if head is None:
            raise NotACall("expected a function name before the arguments")
        reader = LenientJsonReader(body, head.end())
        calls.append(make_call(head[1], reader.object()))
        position = len(body) if not body[reader.position :].strip() else reader.position
    return calls


FORMAT = ToolFormat(
    name="mistral",
    blocks=(Block(START),),
    parse=parse,
    head=re.compile(rf"\s*(?:\[TOOL_CALLS\])?[\s,\[]*(?:{CALL_HEAD}|{_HEADED}(?=\{{))"),
    inner_markers=(ARGS, CALL_ID),
    id_format="mistral",
    syntax=CallSyntax(f"{START}{{name}}{ARGS}", ""),
    template_hints=((START, ARGS),),
    token_hints=(START, ARGS),
)
JSON = dataclasses.replace(
    FORMAT,
    name="mistral-json",
    syntax=CallSyntax('{"name": "{name}", "arguments": ', "}", opening=f"{START} [", between=", ", closing="]"),
    template_hints=((START,),),
    token_hints=(START,),
)
