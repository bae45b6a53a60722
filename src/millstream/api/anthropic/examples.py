"""Example requests for /docs. The tests send all of them."""

from __future__ import annotations

from typing import Any

_WEATHER = {
    "name": "weather",
    "description": "The weather in a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def _user(content: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": content}]


_QUESTION: dict[str, Any] = {"system": "Answer in one sentence.", "messages": _user("What is a millstream?")}
_TOOLS: dict[str, Any] = {"messages": _user("How is the weather in Bern?"), "tools": [_WEATHER]}

MESSAGES: dict[str, Any] = {
    "question": {"summary": "A question", "value": {**_QUESTION, "max_tokens": 64}},
    "stream": {
        "summary": "Streamed",
        "value": {"messages": _user("Count to ten."), "max_tokens": 64, "stream": True},
    },
    "schema": {
        "summary": "Structured output: JSON that matches a schema",
        "value": {
            "messages": _user("Name a river and its length in km."),
            "max_tokens": 64,
            "output_config": {
                "format": {
                    "type": "json_schema",
                    "schema": {
                        "type": "object",
                        "properties": {"name": {"type": "string", "maxLength": 20}, "km": {"type": "integer"}},
                        "required": ["name", "km"],
                        "additionalProperties": False,
                    },
                }
            },
        },
    },
    "tools": {"summary": "With a tool that the model may call", "value": {**_TOOLS, "max_tokens": 64}},
    "thinking": {
        "summary": "With reasoning of at most 1024 tokens, for models that reason",
        "value": {**_QUESTION, "max_tokens": 2048, "thinking": {"type": "enabled", "budget_tokens": 1024}},
    },
}
COUNT: dict[str, Any] = {
    "question": {"summary": "A question", "value": _QUESTION},
    "tools": {"summary": "With a tool", "value": _TOOLS},
}
