"""Tool-call format of Kimi K2: an id with the function's name, and JSON arguments.

<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Oslo"}
<|tool_call_end|><|tool_calls_section_end|>
"""

from __future__ import annotations

import re

from millstream.text.tool_formats.format import Block, CallSyntax, Schemas, ToolCall, ToolFormat
from millstream.text.tool_formats.json_calls import parse_matches, strip_markers

START, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, CALL_END, ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"

_NAME = rf"{re.escape(CALL)}\s*(?:functions\.)?([\w.-]+)(?::\d+)?\s*{re.escape(ARGUMENTS)}\s*"
_CALL = re.compile(rf"{_NAME}(.*?){re.escape(CALL_END)}", re.DOTALL)


def parse(source: str, schemas: Schemas) -> list[ToolCall]:
    return parse_matches(strip_markers(source, [START], [END]), _CALL)


FORMAT = ToolFormat(
    name="kimi",
    blocks=(Block(START, (END,)), Block(CALL, (CALL_END,))),
    parse=parse,
    head=re.compile(rf"\s*(?:{re.escape(START)})?\s*{_NAME}(?=\{{)"),
    separators=re.compile(rf"(?:\s|{re.escape(CALL_END)})*"),
    inner_markers=(ARGUMENTS,),
    hidden_markers=(END,),
    id_format="kimi",
    syntax=CallSyntax(f"{CALL}functions.{{name}}:0{ARGUMENTS}", CALL_END, opening=START, closing=END, many=False),
    template_hints=((START,),),
    token_hints=(START, ARGUMENTS),
)
