"""Tool-call formats of DeepSeek V3 and R1, V3.1 and V3.2.

V3:   <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
      ```json
      {"city": "Oslo"}
      ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
V3.1: the same, with <｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Oslo"}<｜tool▁call▁end｜>
V3.2: <｜DSML｜function_calls> with invoke and parameter tags
"""

from __future__ import annotations

import dataclasses
import re

from millstream.text.tool_formats.format import Block, CallSyntax, KeyedArguments, Schemas, ToolCall, ToolFormat
from millstream.text.tool_formats.invoke import InvokeParser
from millstream.text.tool_formats.json_calls import parse_matches, strip_markers

START, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
DSML = "｜DSML｜"

_NAME = rf"{CALL}\s*(?:function{SEPARATOR})?([\w.-]+)\s*(?:{SEPARATOR}|\n```json)\s*"
_CALL = re.compile(rf"{_NAME}(.*?){CALL_END}", re.DOTALL)
_DSML_PARSER = InvokeParser(DSML)


def parse(source: str, schemas: Schemas) -> list[ToolCall]:
    return parse_matches(strip_markers(source, [START], [END]), _CALL, _without_fence)


def _without_fence(arguments: str) -> str:
    return arguments.strip().removeprefix("```json").removesuffix("```")


def parse_dsml(source: str, schemas: Schemas) -> list[ToolCall]:
    return _DSML_PARSER.parse(strip_markers(source, [f"<{DSML}function_calls>"], [f"</{DSML}function_calls>"]), schemas)


V3_1 = ToolFormat(
    name="deepseek-v3.1",
    blocks=(Block(START, (END,)),),
    parse=parse,
    head=re.compile(rf"\s*(?:{START})?\s*{_NAME}(?=\{{)"),
    separators=re.compile(rf"(?:\s|```|{CALL_END})*"),
    inner_markers=(CALL, CALL_END, SEPARATOR),
    syntax=CallSyntax(f"{CALL}{{name}}{SEPARATOR}", CALL_END, opening=START, closing=END),
    template_hints=((START,),),
    token_hints=(START, SEPARATOR),
)
V3 = dataclasses.replace(
    V3_1,
    name="deepseek-v3",
    syntax=CallSyntax(
        f"{CALL}function{SEPARATOR}{{name}}\n```json\n", f"\n```{CALL_END}", opening=START, between="\n", closing=END
    ),
    template_hints=((START, "```json"),),
    token_hints=(),
)
V3_2 = ToolFormat(
    name="deepseek-v3.2",
    blocks=(Block(f"<{DSML}function_calls>", (f"</{DSML}function_calls>",)),),
    parse=parse_dsml,
    inner_markers=(DSML,),
    syntax=CallSyntax(
        f'<{DSML}invoke name="{{name}}">\n',
        f"</{DSML}invoke>\n",
        opening=f"<{DSML}function_calls>\n",
        closing=f"</{DSML}function_calls>",
        arguments=KeyedArguments(f'<{DSML}parameter name="{{key}}">', f"</{DSML}parameter>\n"),
    ),
    template_hints=((DSML, "function_calls"),),
)
