"""Tool-call format of Hermes, Qwen 2.5 and 3, Granite 4 and many others: a JSON object between tags.

<tool_call>
{"name": "get_weather", "arguments": {"city": "Oslo"}}
</tool_call>
"""

from __future__ import annotations

import re

from millstream.text.tool_formats.format import Block, CallSyntax, Schemas, ToolCall, ToolFormat
from millstream.text.tool_formats.json_calls import CALL_HEAD, parse_json_calls, strip_markers

START, END = "<tool_call>", "</tool_call>"


def parse(source: str, schemas: Schemas) -> list[ToolCall]:
    return parse_json_calls(strip_markers(source, [START], [END]))


FORMAT = ToolFormat(
    name="hermes",
    blocks=(Block(START, (END,)),),
    parse=parse,
    head=re.compile(rf"\s*(?:{START})?\s*\[?\s*{CALL_HEAD}"),
    syntax=CallSyntax(f'{START}\n{{"name": "{{name}}", "arguments": ', f"}}\n{END}", between="\n"),
    template_hints=((START,),),
    token_hints=(START, END),
)
