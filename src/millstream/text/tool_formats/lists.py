"""Tool-call formats of Granite 3 and Nemotron Nano: a JSON list of calls after a marker.

<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]
<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]</TOOLCALL>
"""

from __future__ import annotations

import re

from millstream.text.tool_formats.format import Block, CallSyntax, Schemas, ToolCall, ToolFormat
from millstream.text.tool_formats.json_calls import CALL_HEAD, parse_json_calls, strip_markers

GRANITE_START = "<|tool_call|>"
NEMOTRON_START, NEMOTRON_END = "<TOOLCALL>", "</TOOLCALL>"


def parse(source: str, schemas: Schemas) -> list[ToolCall]:
    return parse_json_calls(strip_markers(source, [GRANITE_START, NEMOTRON_START], [NEMOTRON_END]))


GRANITE = ToolFormat(
    name="granite",
    blocks=(Block(GRANITE_START),),
    parse=parse,
    head=re.compile(rf"\s*(?:<\|tool_call\|>)?[\s,\[]*{CALL_HEAD}"),
    syntax=CallSyntax('{"name": "{name}", "arguments": ', "}", opening=f"{GRANITE_START}[", between=", ", closing="]"),
    template_hints=((GRANITE_START,),),
    token_hints=(GRANITE_START,),
)
NEMOTRON = ToolFormat(
    name="nemotron",
    blocks=(Block(NEMOTRON_START, (NEMOTRON_END,)),),
    parse=parse,
    head=re.compile(rf"\s*(?:<TOOLCALL>)?[\s,\[]*{CALL_HEAD}"),
    syntax=CallSyntax(
        '{"name": "{name}", "arguments": ',
        "}",
        opening=f"{NEMOTRON_START}[",
        between=", ",
        closing=f"]{NEMOTRON_END}",
    ),
    template_hints=((NEMOTRON_START,),),
)
