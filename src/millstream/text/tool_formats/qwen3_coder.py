"""Qwen3-Coder, Qwen3.5, Nemotron 3, Step 3.5: tags with the names inside, values without types.

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

from millstream.text.tool_formats.format import Block, Keyed, NotACall, Schemas, ToolCall, ToolFormat, Written
from millstream.text.tool_formats.json_calls import inside, read_calls
from millstream.text.tool_formats.values import typed

START, END = "<tool_call>", "</tool_call>"
FUNCTION_END = "</function>"

# Small models forget an end tag now and then; the next tag then tells where a value or a function ends.
_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>|(?=<function=)|(?=</tool_call>))", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|$)", re.DOTALL)


def parse(source: str, schemas: Schemas) -> list[ToolCall]:
    body = inside(source, [START], [])
    if body.startswith(("{", "[")):
        return read_calls(body.removesuffix(END).strip())
    calls = [_call(found[1], found[2], schemas) for found in _FUNCTION.finditer(body)]
    if not calls or _FUNCTION.sub("", body).removesuffix(END).strip():
        raise NotACall("text beside the functions")
    return calls


def _call(name: str, body: str, schemas: Schemas) -> ToolCall:
    if _PARAMETER.sub("", body).strip():
        raise NotACall("text beside the parameters")
    raw = {key.strip(): unwrapped(value) for key, value in _PARAMETER.findall(body)}
    return typed(name, raw, schemas)


def unwrapped(value: str) -> str:
    """Without the one line break that templates put on each side of a value."""
    return value.removeprefix("\n").removesuffix("\n")


FORMAT = ToolFormat(
    name="qwen3-coder",
    blocks=(Block(START, (END,)), Block("<function=", (FUNCTION_END,))),
    parse=parse,
    silent=(END,),
    written=Written(
        f"{START}\n<function={{name}}>\n",
        f"</function>\n{END}",
        between="\n",
        arguments=Keyed("<parameter={key}>\n", "\n</parameter>\n"),
    ),
    signs=((START, "<function="),),
)
