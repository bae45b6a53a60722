"""Kimi K2.

<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Oslo"}
<|tool_call_end|><|tool_calls_section_end|>
"""

from __future__ import annotations

import re

from millstream.text.tool_formats.format import Block, Schemas, ToolCall, ToolFormat, Written
from millstream.text.tool_formats.json_calls import calls_in, inside

START, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, CALL_END, ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"

_NAME = rf"{re.escape(CALL)}\s*(?:functions\.)?([\w.-]+)(?::\d+)?\s*{re.escape(ARGUMENTS)}\s*"
_CALL = re.compile(rf"{_NAME}(.*?){re.escape(CALL_END)}", re.DOTALL)


def parse(source: str, schemas: Schemas) -> list[ToolCall]:
    return calls_in(inside(source, [START], [END]), _CALL)


FORMAT = ToolFormat(
    name="kimi",
    blocks=(Block(START, (END,)), Block(CALL, (CALL_END,))),
    parse=parse,
    head=re.compile(rf"\s*(?:{re.escape(START)})?\s*{_NAME}(?=\{{)"),
    glue=re.compile(rf"(?:\s|{re.escape(CALL_END)})*"),
    inner=(ARGUMENTS,),
    silent=(END,),
    ids="kimi",
    written=Written(f"{CALL}functions.{{name}}:0{ARGUMENTS}", CALL_END, opening=START, closing=END, many=False),
    signs=((START,),),
    tokens=(START, ARGUMENTS),
)
