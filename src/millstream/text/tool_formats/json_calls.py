"""What the formats share that write a call as a JSON object."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.text.tool_formats.format import NotACall, ToolCall
from millstream.text.tool_formats.relaxed import RelaxedReader
from millstream.text.tool_formats.values import calls_of, load_json

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


def read_calls(body: str) -> list[ToolCall]:
    """JSON, or what was meant to be: single quotes, bare keys, one object after another."""
    try:
        return calls_of(load_json(body))
    except NotACall:
        reader = RelaxedReader(body.rstrip("; \n"))
        calls = calls_of(reader.value())
        reader.end()
        return calls
