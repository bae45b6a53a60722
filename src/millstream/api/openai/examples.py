"""Example requests for /docs. The tests send all of them."""

from __future__ import annotations

from typing import Any

_PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk"
    "+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
_WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def _user(content: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": content}]


CHAT: dict[str, Any] = {
    "question": {
        "summary": "A question",
        "value": {
            "messages": [
                {"role": "system", "content": "Answer in one sentence."},
                *_user("What is a millstream?"),
            ],
            "max_tokens": 64,
        },
    },
    "stream": {
        "summary": "Streamed, with token counts at the end",
        "value": {
            "messages": _user("Count to ten."),
            "max_tokens": 64,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    },
    "schema": {
        "summary": "Structured output: JSON that matches a schema",
        "value": {
            "messages": _user("Name a river and its length in km."),
            "max_tokens": 64,
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "river",
                    "schema": {
                        "type": "object",
                        "properties": {"name": {"type": "string", "maxLength": 20}, "km": {"type": "integer"}},
                        "required": ["name", "km"],
                        "additionalProperties": False,
                    },
                },
            },
        },
    },
    "tools": {
        "summary": "With a tool that the model may call",
        "value": {"messages": _user("How is the weather in Bern?"), "max_tokens": 64, "tools": [_WEATHER]},
    },
    "image": {
        "summary": "With an image, for vision models",
        "value": {
            "messages": _user(
                [
                    {"type": "text", "text": "What is in this image?"},
                    {"type": "image_url", "image_url": {"url": _PIXEL}},
                ]
            ),
            "max_tokens": 64,
        },
    },
}

COMPLETION: dict[str, Any] = {
    "text": {
        "summary": "A text",
        "value": {"prompt": "A mill stands by the", "max_tokens": 16, "temperature": 0.7, "stop": ["\n"]},
    },
    "several": {
        "summary": "Two completions for each of two prompts, with log-probabilities",
        "value": {"prompt": ["Once upon", "The river"], "max_tokens": 8, "n": 2, "logprobs": 2},
    },
    "stream": {"summary": "Streamed", "value": {"prompt": "One, two,", "max_tokens": 16, "stream": True}},
}
