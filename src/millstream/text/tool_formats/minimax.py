"""Tool-call format of MiniMax M2: XML with names in attributes.

<minimax:tool_call>
<invoke name="get_weather">
<parameter name="city">Oslo</parameter>
</invoke>
</minimax:tool_call>
"""

from __future__ import annotations

from millstream.text.tool_formats.format import Block, CallSyntax, KeyedArguments, Schemas, ToolCall, ToolFormat
from millstream.text.tool_formats.invoke import InvokeParser
from millstream.text.tool_formats.json_calls import strip_markers

START, END = "<minimax:tool_call>", "</minimax:tool_call>"
_PARSER = InvokeParser()


def parse(source: str, schemas: Schemas) -> list[ToolCall]:
    return _PARSER.parse(strip_markers(source, [START], [END]), schemas)


FORMAT = ToolFormat(
    name="minimax",
    blocks=(Block(START, (END,)),),
    parse=parse,
    syntax=CallSyntax(
        '<invoke name="{name}">\n',
        "</invoke>\n",
        opening=f"{START}\n",
        closing=END,
        arguments=KeyedArguments('<parameter name="{key}">', "</parameter>\n"),
    ),
    template_hints=((START,),),
    token_hints=(START, END),
)
