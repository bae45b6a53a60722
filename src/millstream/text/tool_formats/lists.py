"""Granite 3 and Nemotron Nano: a JSON list of calls after a marker.

<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]
<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]</TOOLCALL>
"""

from __future__ import annotations

import re

from millstream.text.tool_formats.format import Block, Schemas, ToolCall, ToolFormat, Written
from millstream.text.tool_formats.json_calls import NAMED, inside, read_calls

GRANITE_START = "<|tool_call|>"
NEMOTRON_START, NEMOTRON_END = "<TOOLCALL>", "</TOOLCALL>"


def parse(source: str, schemas: Schemas) -> list[ToolCall]:
    return read_calls(inside(source, [GRANITE_START, NEMOTRON_START], [NEMOTRON_END]))


GRANITE = ToolFormat(
    name="granite",
    blocks=(Block(GRANITE_START),),
    parse=parse,
    head=re.compile(rf"\s*(?:<\|tool_call\|>)?[\s,\[]*{NAMED}"),
    written=Written('{"name": "{name}", "arguments": ', "}", opening=f"{GRANITE_START}[", between=", ", closing="]"),
    signs=((GRANITE_START,),),
    tokens=(GRANITE_START,),
)
NEMOTRON = ToolFormat(
    name="nemotron",
    blocks=(Block(NEMOTRON_START, (NEMOTRON_END,)),),
    parse=parse,
    head=re.compile(rf"\s*(?:<TOOLCALL>)?[\s,\[]*{NAMED}"),
    written=Written(
        '{"name": "{name}", "arguments": ',
        "}",
        opening=f"{NEMOTRON_START}[",
        between=", ",
        closing=f"]{NEMOTRON_END}",
    ),
    signs=((NEMOTRON_START,),),
)
