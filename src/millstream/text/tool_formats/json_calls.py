"""What the formats share that write a call as a JSON object."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from millstream.text.tool_formats.format import NotACall, ToolCall
from millstream.text.tool_formats.relaxed import RelaxedReader
from millstream.text.tool_formats.values import calls_of, checked, load_json

NAMED = r'\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
"""The beginning of a call, up to its arguments."""


def inside(source: str, starts: Sequence[str], ends: Sequence[str]) -> str:
    """A block without its markers."""
    body = source.strip()
    for start in starts:
        body = body.removeprefix(start)
    for end in ends:
        body = body.removesuffix(end)
    return body.strip()


def calls_in(body: str, pattern: re.Pattern[str], read: Callable[[str], str] = str) -> list[ToolCall]:
    """Calls of which `pattern` finds name and arguments, one after the other and with nothing between them. `read`
    takes away what stands around the arguments."""
    calls = []
    for found in pattern.finditer(body):
        reader = RelaxedReader(read(found[2]))
        arguments = reader.object()
        reader.end()
        calls.append(checked(found[1], arguments))
    if not calls or pattern.sub("", body).strip():
        raise NotACall("text beside the calls")
    return calls


def read_calls(body: str) -> list[ToolCall]:
    """JSON, or what was meant to be: single quotes, bare keys, one object after another."""
    try:
        return calls_of(load_json(body))
    except NotACall:
        reader = RelaxedReader(body.rstrip("; \n"))
        calls = calls_of(reader.value())
        reader.end()
        return calls
