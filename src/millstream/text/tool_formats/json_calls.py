"""Helpers shared by the formats that write a call as a JSON object."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from millstream.text.tool_formats.format import NotACall, ToolCall
from millstream.text.tool_formats.lenient_json import LenientJsonReader
from millstream.text.tool_formats.values import make_call, parse_json, to_calls

CALL_HEAD = r'\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
"""Start of a call, up to its arguments."""


def strip_markers(source: str, starts: Sequence[str], ends: Sequence[str]) -> str:
    """Returns a block without its markers."""
    body = source.strip()
    for start in starts:
        body = body.removeprefix(start)
    for end in ends:
        body = body.removesuffix(end)
    return body.strip()


def parse_matches(body: str, pattern: re.Pattern[str], unwrap: Callable[[str], str] = str) -> list[ToolCall]:
    """Parses calls whose name and arguments are the two groups of `pattern`.

    `unwrap` removes what surrounds the arguments. Raises `NotACall` if there is any text between the calls.
    """
    calls = []
    for found in pattern.finditer(body):
        reader = LenientJsonReader(unwrap(found[2]))
        arguments = reader.object()
        reader.end()
        calls.append(make_call(found[1], arguments))
    if not calls or pattern.sub("", body).strip():
        raise NotACall("text outside of the calls")
    return calls


def parse_json_calls(body: str) -> list[ToolCall]:
    """Parses calls in JSON, or in what models write for JSON: single quotes, bare keys, several objects in a row."""
    try:
        return to_calls(parse_json(body))
    except NotACall:
        reader = LenientJsonReader(body.rstrip("; \n"))
        calls = to_calls(reader.value())
        reader.end()
        return calls
