"""Hermes, Qwen 2.5 and 3, Granite 4 and many others: a JSON object between tags.

<tool_call>
{"name": "get_weather", "arguments": {"city": "Oslo"}}
</tool_call>
"""

from __future__ import annotations

import re

from millstream.text.tool_formats.format import Block, Schemas, ToolCall, ToolFormat, Written
from millstream.text.tool_formats.json_calls import NAMED, inside, read_calls

START, END = "<tool_call>", "</tool_call>"


def parse(source: str, schemas: Schemas) -> list[ToolCall]:
    return read_calls(inside(source, [START], [END]))


FORMAT = ToolFormat(
    name="hermes",
    blocks=(Block(START, (END,)),),
    parse=parse,
    head=re.compile(rf"\s*(?:{START})?\s*\[?\s*{NAMED}"),
    written=Written(f'{START}\n{{"name": "{{name}}", "arguments": ', f"}}\n{END}", between="\n"),
    signs=((START,),),
    tokens=(START, END),
)
