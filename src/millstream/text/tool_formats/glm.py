"""GLM 4.5 to 4.7: a name, then pairs of tags, values without types.

<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>
"""

from __future__ import annotations

import re

from millstream.text.tool_formats.format import Block, Keyed, NotACall, Schemas, ToolCall, ToolFormat, Written
from millstream.text.tool_formats.json_calls import inside, read_calls
from millstream.text.tool_formats.values import typed

START, END = "<tool_call>", "</tool_call>"
_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_NAME = re.compile(r"[\w.-]+")


def parse(source: str, schemas: Schemas) -> list[ToolCall]:
    body = inside(source, [START], [END])
    if body.startswith(("{", "[")):
        return read_calls(body)
    name, sign, _ = body.partition("<arg_key>")
    if not _NAME.fullmatch(name.strip()) or _PAIR.sub("", sign + body[len(name) + len(sign) :]).strip():
        raise NotACall("not a name and pairs of keys and values")
    return [typed(name, {key.strip(): value for key, value in _PAIR.findall(body)}, schemas)]


FORMAT = ToolFormat(
    name="glm",
    blocks=(Block(START, (END,)),),
    parse=parse,
    inner=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    stops=("<|observation|>",),
    written=Written(
        f"{START}{{name}}",
        END,
        arguments=Keyed("<arg_key>{key}</arg_key><arg_value>", "</arg_value>"),
    ),
    signs=((START, "<arg_key>"),),
)
