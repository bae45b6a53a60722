"""Tool-call formats of Gemma 4 and FunctionGemma: bare keys, and special tokens as string quotes.

<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>}<tool_call|>
<start_function_call>call:get_weather{city:<escape>Oslo<escape>}<end_function_call>

Quantised models also write ordinary quotes: {city:'Oslo'}.
"""

from __future__ import annotations

import re

from millstream.text.tool_formats.format import (
    Block,
    CallSyntax,
    KeyedArguments,
    NotACall,
    ReasoningMarkers,
    Schemas,
    ToolCall,
    ToolFormat,
)
from millstream.text.tool_formats.json_calls import parse_json_calls, strip_markers
from millstream.text.tool_formats.lenient_json import LenientJsonReader
from millstream.text.tool_formats.values import make_call, typed_value

START, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
FUNCTION_START, FUNCTION_END, ESCAPE = "<start_function_call>", "<end_function_call>", "<escape>"

_NAME = re.compile(r"[\s,;]*(?:call:)?\s*([\w.-]+)\s*(?=\{)")


def parse(source: str, schemas: Schemas) -> list[ToolCall]:
    body = strip_markers(source, [START, FUNCTION_START], [END, FUNCTION_END])
    if body.startswith(("{", "[")):
        return parse_json_calls(body)
    calls: list[ToolCall] = []
    position = 0
    while position < len(body):
        name = _NAME.match(body, position)
        if name is None:
            raise NotACall("expected a function name before the arguments")
        reader = LenientJsonReader(body, name.end(), (QUOTE, ESCAPE))
        calls.append(_convert(name[1], reader.object(), schemas))
        position = reader.position if body[reader.position :].strip() else len(body)
    if not calls:
        raise NotACall("the block is empty")
    return calls


def _convert(name: str, arguments: dict[str, object], schemas: Schemas) -> ToolCall:
    """Converts arguments to the schema's types: models leave out the quotes around strings that look like numbers."""
    properties = schemas.get(name, {}).get("properties")
    known = properties if isinstance(properties, dict) else {}
    for key, value in arguments.items():
        schema = known.get(key)
        wanted = schema.get("type") if isinstance(schema, dict) else None
        if isinstance(value, str) and wanted not in (None, "string"):
            arguments[key] = typed_value(value, schema)
        elif wanted == "string" and isinstance(value, int | float) and not isinstance(value, bool):
            arguments[key] = str(value)
    return make_call(name, arguments)


GEMMA_4 = ToolFormat(
    name="gemma",
    blocks=(Block(START, (END,)),),
    parse=parse,
    inner_markers=(QUOTE,),
    stop_tokens=("<|tool_response>",),
    reasoning=ReasoningMarkers(("<|channel>thought",), ("<channel|>",)),
    syntax=CallSyntax(
        f"{START}call:{{name}}{{", f"}}{END}", arguments=KeyedArguments("{key}:", "", between=",", quote=QUOTE)
    ),
    template_hints=((START, QUOTE), (START, "<tool_call|>")),
    token_hints=(START, END),
)
FUNCTION_GEMMA = ToolFormat(
    name="functiongemma",
    blocks=(Block(FUNCTION_START, (FUNCTION_END,)),),
    parse=parse,
    inner_markers=(ESCAPE,),
    stop_tokens=("<start_function_response>",),
    syntax=CallSyntax(
        f"{FUNCTION_START}call:{{name}}{{",
        f"}}{FUNCTION_END}",
        arguments=KeyedArguments("{key}:", "", between=",", quote=ESCAPE),
    ),
    template_hints=((FUNCTION_START,),),
    token_hints=(FUNCTION_START, FUNCTION_END),
)
