"""Example requests for /docs. The tests send all of them."""

from __future__ import annotations

from typing import Any

_PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
_RIVER = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "km": {"type": "integer"}},
    "required": ["name", "km"],
    "additionalProperties": False,
}
_WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def _user(content: str, **more: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": content, **more}]


CHAT: dict[str, Any] = {
    "question": {
        "summary": "A question, streamed",
        "value": {"messages": _user("What is a millstream?"), "options": {"num_predict": 64}},
    },
    "schema": {
        "summary": "Structured output: JSON that matches a schema",
        "value": {
            "messages": _user("Name a river and its length in km."),
            "stream": False,
            "format": _RIVER,
            "options": {"num_predict": 64},
        },
    },
    "tools": {
        "summary": "With a tool that the model may call",
        "value": {
            "messages": _user("How is the weather in Bern?"),
            "stream": False,
            "tools": [_WEATHER],
            "options": {"num_predict": 64},
        },
    },
    "image": {
        "summary": "With an image, for vision models",
        "value": {"messages": _user("What is in this image?", images=[_PIXEL]), "options": {"num_predict": 64}},
    },
}

GENERATE: dict[str, Any] = {
    "prompt": {
        "summary": "A prompt",
        "value": {"prompt": "Why is the sky blue?", "stream": False, "options": {"num_predict": 16}},
    },
    "raw": {
        "summary": "A text to continue as it is",
        "value": {"prompt": "One, two,", "raw": True, "options": {"num_predict": 16, "temperature": 0}},
    },
    "load": {"summary": "Load the model, and keep it loaded for ten minutes", "value": {"keep_alive": "10m"}},
}
