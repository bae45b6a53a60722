"""Mistral: a list of objects after a marker, and from 2025 on a name and its arguments.

[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo"}, "id": "a1b2c3d4e"}]
[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}
"""

from __future__ import annotations

import dataclasses
import re

from millstream.text.tool_formats.format import Block, NotACall, Schemas, ToolCall, ToolFormat, Written
from millstream.text.tool_formats.json_calls import NAMED, inside, read_calls
from millstream.text.tool_formats.relaxed import RelaxedReader
from millstream.text.tool_formats.values import checked

START, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_HEADED = r"([\w.-]+)\s*(?:\[CALL_ID\]\w+)?\s*\[ARGS\]\s*"
_HEADED_CALL = re.compile(rf"\s*(?:\[TOOL_CALLS\])?\s*{_HEADED}")


def parse(source: str, schemas: Schemas) -> list[ToolCall]:
    body = inside(source, [START], [])
    if ARGS not in body:
        return read_calls(body)
    calls: list[ToolCall] = []
    place = 0
    while place < len(body):
        head = _HEADED_CALL.match(body, place)
        if head is None:
            raise NotACall("no name before the arguments")
        reader = RelaxedReader(body, head.end())
        calls.append(checked(head[1], reader.object()))
        place = len(body) if not body[reader.place :].strip() else reader.place
    return calls


FORMAT = ToolFormat(
    name="mistral",
    blocks=(Block(START),),
    parse=parse,
    head=re.compile(rf"\s*(?:\[TOOL_CALLS\])?[\s,\[]*(?:{NAMED}|{_HEADED}(?=\{{))"),
    inner=(ARGS, CALL_ID),
    ids="mistral",
    written=Written(f"{START}{{name}}{ARGS}", ""),
    signs=((START, ARGS),),
    tokens=(START, ARGS),
)
JSON = dataclasses.replace(
    FORMAT,
    name="mistral-json",
    written=Written('{"name": "{name}", "arguments": ', "}", opening=f"{START} [", between=", ", closing="]"),
    signs=((START,),),
    tokens=(START,),
)
