"""JSON schemas of request fields that are read by functions of ours, and what holds for all fields of a body.

A schema here says what the reader of its field takes: schemathesis holds the two against each other.
"""

from __future__ import annotations

from typing import Any

from millstream.api.openai.fields import MAX_BIAS, MAX_BIASES, MAX_PROMPTS, MAX_STOP_LENGTH, MAX_STOPS
from millstream.api.openai.messages import ROLES
from millstream.api.openai.params import UNSERVED, UNSERVED_STREAM_OPTIONS, Neutrals
from millstream.api.openai.parts import PART_SCHEMA
from millstream.api.openai.tools import MAX_TOOLS, NAME_PATTERN, WORDS

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
                "arguments": {"anyOf": [_TEXT, _OBJECT], "description": "A JSON object, as text or as it is."},
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
            "tool_call_id": nullable(_TEXT) | {"description": "With the role tool: the call that this answers."},
            "reasoning_content": nullable(_TEXT) | {"description": "The model's own, sent back to it."},
            "annotations": {"description": "Ignored."},
        },
        "additionalProperties": {
            "description": "No other field is served. Empty ones are let pass, so that an answer can be sent back.",
            "enum": [None, []],
        },
    }


_OTHERS = [role for role in ROLES if role != "assistant"]
MESSAGES: Schema = {
    "type": "array",
    "minItems": 1,
    "items": {
        "anyOf": [
            _message("Message", _OTHERS, _CONTENT, "content"),
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
                "strict": {"description": "Arguments follow their schema if a call must come, strict or not."},
            },
        },
    },
}
TOOLS: Schema = {"type": "array", "items": _TOOL, "maxItems": MAX_TOOLS}
TOOL_CHOICE: Schema = {
    "anyOf": [
        {"enum": list(WORDS)},
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
    """For bodies: null stands for "not given", and no other names are taken than those that ask for nothing."""
    _complete(schema, UNSERVED)


def complete_stream_options(schema: Schema) -> None:
    _complete(schema, UNSERVED_STREAM_OPTIONS)


def _complete(schema: Schema, unserved: Neutrals) -> None:
    properties, required = schema["properties"], schema.get("required", ())
    for name, field in properties.items():
        if name not in required:
            properties[name] = _optional(field)
    for name, neutrals in unserved.items():
        if name not in properties:
            properties[name] = {
                "enum": [None, *neutrals],
                "description": "Not served. Only values that ask for nothing are taken.",
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
