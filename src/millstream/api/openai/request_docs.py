"""JSON schemas of request fields that our own functions parse, and rules for all fields of a body.

A schema here must match its parser: schemathesis tests one against the other.
"""

from __future__ import annotations

from typing import Any

from millstream.api.openai.fields import MAX_BIAS, MAX_BIASES, MAX_PROMPTS, MAX_STOP_LENGTH, MAX_STOPS
from millstream.api.openai.messages import ROLES
from millstream.api.openai.params import UNSUPPORTED, UNSUPPORTED_STREAM_OPTIONS, Neutrals
from millstream.api.openai.parts import PART_SCHEMA
from millstream.api.openai.tools import CHOICES, MAX_TOOLS, NAME_PATTERN

Schema = dict[str, Any]

NULL: Schema = {"type": "null"}
_TEXT: Schema = {"type": "string"}
_OBJECT: Schema = {"type": "object"}
_TOKENS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}


def nullable(*options: Schema) -> Schema:
    return {"anyOf": [*options, NULL]}


PROMPTS: Schema = {
    "anyOf": [
        _TEXT,
        _TOKENS,
        {"type": "array", "items": {"anyOf": [_TEXT, _TOKENS]}, "minItems": 1, "maxItems": MAX_PROMPTS},
    ]
}

_STOP_TEXT: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
STOP: Schema = {"anyOf": [_STOP_TEXT, {"type": "array", "items": _STOP_TEXT, "maxItems": MAX_STOPS}]}

BIAS: Schema = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]{1,9}$"},
    "maxProperties": MAX_BIASES,
    "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
}

_CALL: Schema = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "id": nullable(_TEXT),
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": _TEXT,
                "arguments": {"anyOf": [_TEXT, _OBJECT], "description": "A JSON object, or its text."},
            },
        },
    },
}
_CONTENT: Schema = {"anyOf": [_TEXT, {"type": "array", "items": PART_SCHEMA, "minItems": 1}]}


def _message(title: str, roles: list[str], content: Schema, *required: str) -> Schema:
    return {
        "title": title,
        "type": "object",
        "required": ["role", *required],
        "properties": {
            "role": {"enum": roles},
            "content": content,
            "name": nullable(_TEXT),
            "tool_calls": nullable({"type": "array", "items": _CALL}),
            "tool_call_id": nullable(_TEXT)
            | {"description": "With the role tool: the id of the call that this is the result of."},
            "reasoning_content": nullable(_TEXT) | {"description": "The model's reasoning, sent back to it."},
            "annotations": {"description": "Ignored."},
        },
        "additionalProperties": {
            "description": "No other field is supported. Empty ones are accepted, so that a message can be sent back.",
            "enum": [None, []],
        },
    }


_OTHER_ROLES = [role for role in ROLES if role != "assistant"]
MESSAGES: Schema = {
    "type": "array",
    "minItems": 1,
    "items": {
        "anyOf": [
            _message("Message", _OTHER_ROLES, _CONTENT, "content"),
            _message("AssistantMessage", ["assistant"], nullable(_CONTENT)),
        ]
    },
}

_PARAMETERS: Schema = {
    "type": "object",
    "description": "A JSON schema of the arguments.",
    "properties": {
        "type": {"const": "object"},
        "properties": {"type": "object", "additionalProperties": {"type": ["object", "boolean"]}},
        "required": {"type": "array", "items": _TEXT},
    },
}
_TOOL: Schema = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "pattern": f"^{NAME_PATTERN}$"},
                "description": nullable(_TEXT),
                "parameters": nullable(_PARAMETERS),
                "strict": {
                    "description": "If a call is required, its arguments match their schema with or without strict."
                },
            },
        },
    },
}
TOOLS: Schema = {"type": "array", "items": _TOOL, "maxItems": MAX_TOOLS}
TOOL_CHOICE: Schema = {
    "anyOf": [
        {"enum": list(CHOICES)},
        {
            "type": "object",
            "required": ["type", "function"],
            "properties": {
                "type": {"const": "function"},
                "function": {"type": "object", "required": ["name"], "properties": {"name": _TEXT}},
            },
        },
    ]
}


def complete_request(schema: Schema) -> None:
    """Completes the schema of a body: null means "not given", and unsupported parameters accept neutral values only."""
    _complete(schema, UNSUPPORTED)


def complete_stream_options(schema: Schema) -> None:
    _complete(schema, UNSUPPORTED_STREAM_OPTIONS)


def _complete(schema: Schema, unsupported: Neutrals) -> None:
    properties, required = schema["properties"], schema.get("required", ())
    for name, field in properties.items():
        if name not in required:
            properties[name] = _optional(field)
    for name, neutrals in unsupported.items():
        if name not in properties:
            properties[name] = {
                "enum": [None, *neutrals],
                "description": "Not supported. Only values without effect are accepted.",
            }
    schema["additionalProperties"] = False


_ANNOTATIONS = ("title", "description", "default", "examples", "deprecated")


def _optional(field: Schema) -> Schema:
    if NULL in field.get("anyOf", ()):
        return field
    notes = {key: field[key] for key in _ANNOTATIONS if key in field}
    rules = {key: value for key, value in field.items() if key not in notes}
    options = rules["anyOf"] if rules.keys() == {"anyOf"} else [rules]
    return nullable(*options) | notes
