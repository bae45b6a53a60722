"""gpt-oss: an answer is a row of messages, each in a channel: thoughts, calls, the final words.

<|channel|>analysis<|message|>They want the weather.<|end|><|start|>assistant<|channel|>commentary
to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>
"""

from __future__ import annotations

import re

from millstream.text.tool_formats.format import Block, NotACall, ReasoningMarks, Schemas, ToolCall, ToolFormat, Written
from millstream.text.tool_formats.relaxed import RelaxedReader
from millstream.text.tool_formats.values import checked

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
        raise NotACall("not a message to a function")
    if not found[2].strip():
        return [checked(found[1], {})]
    reader = RelaxedReader(found[2])
    arguments = reader.object()
    reader.end()
    return [checked(found[1], arguments)]


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
    glue=re.compile(r"\s*"),
    silent=(
        "<|start|>assistant",
        "<|channel|>final<|message|>",
        "<|channel|>final <|constrain|>json<|message|>",
        "<|channel|>commentary<|message|>",
        *_ENDS,
    ),
    stops=(CALL, RETURN),
    reasoning=ReasoningMarks(("<|channel|>analysis<|message|>",), (END, CALL, RETURN), "<|start|>assistant"),
    written=Written(f"<|channel|>commentary to=functions.{{name}} <|constrain|>json{MESSAGE}", "", many=False),
    signs=(("<|channel|>", "<|message|>", "commentary"),),
    tokens=("<|channel|>", "<|constrain|>"),
)
