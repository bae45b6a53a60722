"""JSON schemas of request fields that our own functions parse, and rules for all fields of a body.

A schema here must match its parser: schemathesis tests one against the other.
"""

from __future__ import annotations

from millstream.api.functions import MAX_TOOLS, NAME_PATTERN
from millstream.api.openai.fields import MAX_PROMPTS
from millstream.api.openai.messages import ROLES
from millstream.api.openai.params import IGNORED, IGNORED_STREAM_OPTIONS, UNSUPPORTED
from millstream.api.openai.parts import PART_SCHEMA
from millstream.api.openai.tools import CHOICES
from millstream.api.request_docs import NULL, Schema, complete_body, nullable

_TEXT: Schema = {"type": "string"}
_OBJECT: Schema = {"type": "object"}
_TOKENS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}


PROMPTS: Schema = {
    "anyOf": [
        _TEXT,
        _TOKENS,
        {"type": "array", "items": {"anyOf": [_TEXT, _TOKENS]}, "minItems": 1, "maxItems": MAX_PROMPTS},
    ]
}

SWITCH: Schema = {"anyOf": [{"type": "boolean"}, {"const": 0}]}
NUMBER_OR_OFF: Schema = {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 20}, {"const": False}, NULL]}

_CALLED: Schema = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": _TEXT,
        "arguments": nullable(_TEXT, _OBJECT) | {"description": "A JSON object, or its text."},
    },
}
_CALL: Schema = {
    "type": "object",
    "required": ["function"],
    "properties": {"id": nullable(_TEXT), "type": {"enum": ["function", None]}, "function": _CALLED},
}
_CUSTOM_CALL: Schema = {
    "type": "object",
    "required": ["custom"],
    "properties": {
        "id": nullable(_TEXT),
        "type": {"enum": ["custom", None]},
        "custom": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": _TEXT, "input": nullable(_TEXT)},
        },
    },
}
_CONTENT: Schema = nullable(_TEXT, {"type": "array", "items": PART_SCHEMA})
_NOTE = "Fields that are not listed are ignored, so that a message can be sent back as it came."


def _message(title: str, roles: list[str], **properties: Schema) -> Schema:
    return {
        "title": title,
        "description": _NOTE,
        "type": "object",
        "required": ["role"],
        "properties": {"role": {"enum": roles}, "content": _CONTENT, "name": nullable(_TEXT), **properties},
    }


_TOOL_ROLES = [role for role, name in ROLES.items() if name == "tool"]
_OTHER_ROLES = [role for role, name in ROLES.items() if name not in ("assistant", "tool")]
_CALL_ID = nullable(_TEXT) | {"description": "The id of the call that this is the result of."}
MESSAGES: Schema = {
    "type": "array",
    "minItems": 1,
    "items": {
        "anyOf": [
            _message("Message", _OTHER_ROLES),
            _message("ToolMessage", _TOOL_ROLES, tool_call_id=_CALL_ID),
            _message(
                "AssistantMessage",
                ["assistant"],
                tool_calls=nullable({"type": "array", "items": {"anyOf": [_CALL, _CUSTOM_CALL]}}),
                function_call=nullable(_CALLED) | {"description": "The older form of tool_calls."},
                reasoning_content=nullable(_TEXT) | {"description": "The model's reasoning, sent back to it."},
                reasoning={"description": "The same under another name, if it is a string."},
                refusal=nullable(_TEXT) | {"description": "Stands for the content if there is none."},
            ),
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
_NAME: Schema = {"type": "string", "pattern": f"^{NAME_PATTERN}$"}
_FUNCTION: Schema = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": _NAME,
        "description": nullable(_TEXT),
        "parameters": nullable(_PARAMETERS),
        "strict": {"description": "If a call is required, its arguments match their schema with or without strict."},
    },
}
_GRAMMAR: Schema = {
    "type": "object",
    "required": ["syntax", "definition"],
    "properties": {"syntax": {"enum": ["lark", "regex"]}, "definition": {"type": "string", "pattern": "\\S"}},
}
_CUSTOM: Schema = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": _NAME,
        "description": nullable(_TEXT),
        "format": nullable(
            {"type": "object", "required": ["type"], "properties": {"type": {"const": "text"}}},
            {
                "type": "object",
                "required": ["type", "grammar"],
                "properties": {"type": {"const": "grammar"}, "grammar": _GRAMMAR},
            },
        ),
    },
}
_FLAT: Schema = _FUNCTION | {"properties": {**_FUNCTION["properties"], "type": {"const": "function"}}}
_TOOL: Schema = {
    "anyOf": [
        {
            "type": "object",
            "required": ["function"],
            "properties": {"type": {"const": "function"}, "function": _FUNCTION},
        },
        {
            "type": "object",
            "required": ["type", "custom"],
            "properties": {"type": {"const": "custom"}, "custom": _CUSTOM},
        },
        _FLAT,
    ]
}
TOOLS: Schema = {"type": "array", "items": _TOOL, "maxItems": MAX_TOOLS}
FUNCTIONS: Schema = {"type": "array", "items": _FUNCTION, "maxItems": MAX_TOOLS}
FUNCTION_CALL: Schema = {
    "anyOf": [{"enum": ["none", "auto"]}, {"type": "object", "required": ["name"], "properties": {"name": _TEXT}}]
}


def _named(kind: str) -> Schema:
    inner = {"type": "object", "required": ["name"], "properties": {"name": _TEXT}}
    return {"type": "object", "required": ["type", kind], "properties": {"type": {"const": kind}, kind: inner}}


TOOL_CHOICE: Schema = {
    "anyOf": [
        {"enum": list(CHOICES)},
        {"type": "object", "required": ["type"], "properties": {"type": {"enum": list(CHOICES)}}},
        _named("function"),
        _named("custom"),
        {
            "type": "object",
            "required": ["type", "allowed_tools"],
            "properties": {
                "type": {"const": "allowed_tools"},
                "allowed_tools": {
                    "type": "object",
                    "required": ["tools"],
                    "properties": {
                        "mode": {"enum": ["auto", "required"]},
                        "tools": {
                            "type": "array",
                            "minItems": 1,
                            "items": {"anyOf": [_named("function"), _named("custom")]},
                        },
                    },
                },
            },
        },
    ]
}


def complete_request(schema: Schema) -> None:
    complete_body(schema, UNSUPPORTED, IGNORED)


def complete_stream_options(schema: Schema) -> None:
    complete_body(schema, {}, IGNORED_STREAM_OPTIONS)
