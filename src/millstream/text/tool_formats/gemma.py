"""Gemma 4 and FunctionGemma: bare keys, and marks of their own around texts.

<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>}<tool_call|>
<start_function_call>call:get_weather{city:<escape>Oslo<escape>}<end_function_call>

Quantised models write other quotes as well: {city:'Oslo'}.
"""

from __future__ import annotations

import re

from millstream.text.tool_formats.format import (
    Block,
    Keyed,
    NotACall,
    ReasoningMarks,
    Schemas,
    ToolCall,
    ToolFormat,
    Written,
)
from millstream.text.tool_formats.json_calls import inside, read_calls
from millstream.text.tool_formats.relaxed import RelaxedReader
from millstream.text.tool_formats.values import checked, typed_value

START, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
FUNCTION_START, FUNCTION_END, ESCAPE = "<start_function_call>", "<end_function_call>", "<escape>"

_NAME = re.compile(r"[\s,;]*(?:call:)?\s*([\w.-]+)\s*(?=\{)")


def parse(source: str, schemas: Schemas) -> list[ToolCall]:
    body = inside(source, [START, FUNCTION_START], [END, FUNCTION_END])
    if body.startswith(("{", "[")):
        return read_calls(body)
    calls: list[ToolCall] = []
    place = 0
    while place < len(body):
        name = _NAME.match(body, place)
        if name is None:
            raise NotACall("no name before the arguments")
        reader = RelaxedReader(body, name.end(), (QUOTE, ESCAPE))
        calls.append(_fitted(name[1], reader.object(), schemas))
        place = reader.place if body[reader.place :].strip() else len(body)
    if not calls:
        raise NotACall("nothing between the markers")
    return calls


def _fitted(name: str, arguments: dict[str, object], schemas: Schemas) -> ToolCall:
    """A number where the schema wants a text was written without quotes: it is a text."""
    properties = schemas.get(name, {}).get("properties")
    known = properties if isinstance(properties, dict) else {}
    for key, value in arguments.items():
        schema = known.get(key)
        wanted = schema.get("type") if isinstance(schema, dict) else None
        if isinstance(value, str) and wanted not in (None, "string"):
            arguments[key] = typed_value(value, schema)
        elif wanted == "string" and isinstance(value, int | float) and not isinstance(value, bool):
            arguments[key] = str(value)
    return checked(name, arguments)


GEMMA_4 = ToolFormat(
    name="gemma",
    blocks=(Block(START, (END,)),),
    parse=parse,
    inner=(QUOTE,),
    stops=("<|tool_response>",),
    reasoning=ReasoningMarks(("<|channel>thought",), ("<channel|>",)),
    written=Written(f"{START}call:{{name}}{{", f"}}{END}", arguments=Keyed("{key}:", "", between=",", quote=QUOTE)),
    signs=((START, QUOTE), (START, "<tool_call|>")),
    tokens=(START, END),
)
FUNCTION_GEMMA = ToolFormat(
    name="functiongemma",
    blocks=(Block(FUNCTION_START, (FUNCTION_END,)),),
    parse=parse,
    inner=(ESCAPE,),
    stops=("<start_function_response>",),
    written=Written(
        f"{FUNCTION_START}call:{{name}}{{",
        f"}}{FUNCTION_END}",
        arguments=Keyed("{key}:", "", between=",", quote=ESCAPE),
    ),
    signs=((FUNCTION_START,),),
    tokens=(FUNCTION_START, FUNCTION_END),
)
