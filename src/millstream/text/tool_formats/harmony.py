"""Tool-call format of gpt-oss (Harmony): a sequence of messages, each in a channel: reasoning, calls, final answer.

<|channel|>analysis<|message|>They want the weather.<|end|><|start|>assistant<|channel|>commentary
to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>
"""

from __future__ import annotations

import re

from millstream.text.tool_formats.format import (
    Block,
    CallSyntax,
    NotACall,
    ReasoningMarkers,
    Schemas,
    ToolCall,
    ToolFormat,
)
from millstream.text.tool_formats.lenient_json import LenientJsonReader
from millstream.text.tool_formats.values import make_call

CALL, END, RETURN, MESSAGE = "<|call|>", "<|end|>", "<|return|>", "<|message|>"
_ENDS = (CALL, END, RETURN)
_CHANNEL = r"(?:<\|channel\|>(?:commentary|analysis))?"
_HEAD = (
    rf"\s*(?:<\|start\|>assistant)?\s*{_CHANNEL}\s*to=([\w.-]+)\s*{_CHANNEL}"
    r"\s*(?:<\|constrain\|>)?\s*(?:json)?\s*<\|message\|>\s*"
)
_MESSAGE = re.compile(rf"{_HEAD}(.*?)(?:<\|call\|>|<\|end\|>|<\|return\|>|$)", re.DOTALL)


def parse(source: str, schemas: Schemas) -> list[ToolCall]:
    found = _MESSAGE.fullmatch(source.strip())
    if found is None:
        raise NotACall("expected a message to a function")
    if not found[2].strip():
        return [make_call(found[1], {})]
    reader = LenientJsonReader(found[2])
    arguments = reader.object()
    reader.end()
    return [make_call(found[1], arguments)]


FORMAT = ToolFormat(
    name="harmony",
    blocks=(
        Block("<|channel|>commentary to=", _ENDS),
        Block("<|channel|>analysis to=", _ENDS),
        Block("<|start|>assistant to=", _ENDS),
        Block("to=functions.", _ENDS),
    ),
    parse=parse,
    head=re.compile(rf"{_HEAD}(?=\{{)"),
    separators=re.compile(r"\s*"),
    hidden_markers=(
        "<|start|>assistant",
        "<|channel|>final<|message|>",
        "<|channel|>final <|constrain|>json<|message|>",
        "<|channel|>commentary<|message|>",
        *_ENDS,
    ),
    stop_tokens=(CALL, RETURN),
    reasoning=ReasoningMarkers(("<|channel|>analysis<|message|>",), (END, CALL, RETURN), "<|start|>assistant"),
    syntax=CallSyntax(f"<|channel|>commentary to=functions.{{name}} <|constrain|>json{MESSAGE}", "", many=False),
    template_hints=(("<|channel|>", "<|message|>", "commentary"),),
    token_hints=("<|channel|>", "<|constrain|>"),
)
