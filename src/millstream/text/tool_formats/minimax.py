"""MiniMax M2.

<minimax:tool_call>
<invoke name="get_weather">
<parameter name="city">Oslo</parameter>
</invoke>
</minimax:tool_call>
"""

from __future__ import annotations

from millstream.text.tool_formats.format import Block, Keyed, Schemas, ToolCall, ToolFormat, Written
from millstream.text.tool_formats.invoke import InvokeReader
from millstream.text.tool_formats.json_calls import inside

START, END = "<minimax:tool_call>", "</minimax:tool_call>"
_READER = InvokeReader()


def parse(source: str, schemas: Schemas) -> list[ToolCall]:
    return _READER.read(inside(source, [START], [END]), schemas)


FORMAT = ToolFormat(
    name="minimax",
    blocks=(Block(START, (END,)),),
    parse=parse,
    written=Written(
        '<invoke name="{name}">\n',
        "</invoke>\n",
        opening=f"{START}\n",
        closing=END,
        arguments=Keyed('<parameter name="{key}">', "</parameter>\n"),
    ),
    signs=((START,),),
    tokens=(START, END),
)
