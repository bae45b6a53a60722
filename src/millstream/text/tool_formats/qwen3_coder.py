"""Tool-call format of Qwen3-Coder, Qwen3.5, Nemotron 3 and Step 3.5: names in tags, untyped values.

<tool_call>
<function=get_weather>
<parameter=city>
Oslo
</parameter>
</function>
</tool_call>
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
FUNCTION_END = "</function>"

# Small models sometimes forget an end tag. Then the next tag ends the value or the function.
_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>|(?=<function=)|(?=</tool_call>))", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|$)", re.DOTALL)


def parse(source: str, schemas: Schemas) -> list[ToolCall]:
    body = strip_markers(source, [START], [])
    if body.startswith(("{", "[")):
        return parse_json_calls(body.removesuffix(END).strip())
    calls = [_call(found[1], found[2], schemas) for found in _FUNCTION.finditer(body)]
    if not calls or _FUNCTION.sub("", body).removesuffix(END).strip():
        raise NotACall("text outside of the functions")
    return calls


def _call(name: str, body: str, schemas: Schemas) -> ToolCall:
    if _PARAMETER.sub("", body).strip():
        raise NotACall("text outside of the parameters")
    raw = {key.strip(): _unwrap(value) for key, value in _PARAMETER.findall(body)}
    return typed_call(name, raw, schemas)


def _unwrap(value: str) -> str:
    """Removes the line break that templates write on each side of a value."""
    return value.removeprefix("\n").removesuffix("\n")


FORMAT = ToolFormat(
    name="qwen3-coder",
    blocks=(Block(START, (END,)), Block("<function=", (FUNCTION_END,))),
    parse=parse,
    hidden_markers=(END,),
    syntax=CallSyntax(
        f"{START}\n<function={{name}}>\n",
        f"</function>\n{END}",
        between="\n",
        arguments=KeyedArguments("<parameter={key}>\n", "\n</parameter>\n"),
    ),
    template_hints=((START, "<function="),),
)
