"""DeepSeek V3 and R1, V3.1, and V3.2, which has a format of its own.

V3:   <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
      ```json
      {"city": "Oslo"}
      ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
V3.1: the same with <｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Oslo"}<｜tool▁call▁end｜>
V3.2: <｜DSML｜function_calls> with invokes and parameters
"""

from __future__ import annotations

import dataclasses
import re

from millstream.text.tool_formats.format import Block, Keyed, Schemas, ToolCall, ToolFormat, Written
from millstream.text.tool_formats.invoke import InvokeReader
from millstream.text.tool_formats.json_calls import calls_in, inside

START, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
DSML = "｜DSML｜"

_NAME = rf"{CALL}\s*(?:function{SEPARATOR})?([\w.-]+)\s*(?:{SEPARATOR}|\n```json)\s*"
_CALL = re.compile(rf"{_NAME}(.*?){CALL_END}", re.DOTALL)
_DSML_READER = InvokeReader(DSML)


def parse(source: str, schemas: Schemas) -> list[ToolCall]:
    return calls_in(inside(source, [START], [END]), _CALL, _bare)


def _bare(arguments: str) -> str:
    return arguments.strip().removeprefix("```json").removesuffix("```")


def parse_dsml(source: str, schemas: Schemas) -> list[ToolCall]:
    return _DSML_READER.read(inside(source, [f"<{DSML}function_calls>"], [f"</{DSML}function_calls>"]), schemas)


V3_1 = ToolFormat(
    name="deepseek-v3.1",
    blocks=(Block(START, (END,)),),
    parse=parse,
    head=re.compile(rf"\s*(?:{START})?\s*{_NAME}(?=\{{)"),
    glue=re.compile(rf"(?:\s|```|{CALL_END})*"),
    inner=(CALL, CALL_END, SEPARATOR),
    written=Written(f"{CALL}{{name}}{SEPARATOR}", CALL_END, opening=START, closing=END),
    signs=((START,),),
    tokens=(START, SEPARATOR),
)
V3 = dataclasses.replace(
    V3_1,
    name="deepseek-v3",
    written=Written(
        f"{CALL}function{SEPARATOR}{{name}}\n```json\n", f"\n```{CALL_END}", opening=START, between="\n", closing=END
    ),
    signs=((START, "```json"),),
    tokens=(),
)
V3_2 = ToolFormat(
    name="deepseek-v3.2",
    blocks=(Block(f"<{DSML}function_calls>", (f"</{DSML}function_calls>",)),),
    parse=parse_dsml,
    inner=(DSML,),
    written=Written(
        f'<{DSML}invoke name="{{name}}">\n',
        f"</{DSML}invoke>\n",
        opening=f"<{DSML}function_calls>\n",
        closing=f"</{DSML}function_calls>",
        arguments=Keyed(f'<{DSML}parameter name="{{key}}">', f"</{DSML}parameter>\n"),
    ),
    signs=((DSML, "function_calls"),),
)
