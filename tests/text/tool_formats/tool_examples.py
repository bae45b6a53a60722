"""Tools and expected results that all examples of the corpus share."""

# ruff: noqa: E501

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Call = tuple[str, dict[str, Any]]

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        },
        "required": ["city"],
    },
    "search": {
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "limit": {"type": ["integer", "null"]},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["query"],
    },
    "set_light": {
        "type": "object",
        "properties": {
            "room": {"type": "string"},
            "on": {"type": "boolean"},
            "level": {"type": "number"},
            "zone": {"anyOf": [{"type": "object"}, {"type": "null"}]},
        },
    },
    "write_file": {
        "type": "object",
        "properties": {"path": {"type": "string"}, "text": {"type": "string"}},
        "required": ["path", "text"],
    },
    "now": {"type": "object", "properties": {}},
}


@dataclass(frozen=True)
class Example:
    text: str
    calls: tuple[Call, ...] = ()
    content: str = ""
    reasoning: str = ""
    in_reasoning: bool = False
    """True if the prompt has opened the reasoning."""


def good(text: str, *calls: Call, content: str = "", reasoning: str = "", in_reasoning: bool = False) -> Example:
    return Example(text, calls, content, reasoning, in_reasoning)


def broken(text: str) -> Example:
    """A text without a valid call, which becomes content unchanged."""
    return Example(text, content=text)


def weather(city: str, **more: Any) -> Call:
    return ("get_weather", {"city": city, **more})


JSON_ARGUMENTS: list[tuple[str, str, dict[str, Any]]] = [
    ("get_weather", '{"city": "Oslo"}', {"city": "Oslo"}),
    ("get_weather", '{"city":"São Paulo","days":3,"unit":"celsius"}', {"city": "São Paulo", "days": 3, "unit": "celsius"}),
    ("now", "{}", {}),
    ("search", '{"query": "a {brace} and \\"quotes\\" \\\\ here", "limit": null}', {"query": 'a {brace} and "quotes" \\ here', "limit": None}),
    ("search", '{\n  "query": "水車",\n  "tags": ["mühle", "🌊"]\n}', {"query": "水車", "tags": ["mühle", "🌊"]}),
    ("set_light", '{"room": "hall", "on": true, "level": -0.5e1, "zone": {"a": [1, {"b": []}]}}', {"room": "hall", "on": True, "level": -5.0, "zone": {"a": [1, {"b": []}]}}),
    ("write_file", '{"path": "/x.html", "text": "<b>tool_call</b> }]} [ARGS] ```"}', {"path": "/x.html", "text": "<b>tool_call</b> }]} [ARGS] ```"}),
    ("write_file", '{"path": "a.py", "text": "def f():\\n    return {\\"a\\": 1}\\n"}', {"path": "a.py", "text": 'def f():\n    return {"a": 1}\n'}),
    ("write_file", '{"path": "a.txt", "text": "a real\nline break"}', {"path": "a.txt", "text": "a real\nline break"}),
]  # fmt: skip
"""Arguments as models write them in JSON: name, text, value."""
