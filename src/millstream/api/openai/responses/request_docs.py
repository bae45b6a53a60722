"""JSON schemas of the request fields that our own functions parse, for /openapi.json.

They describe less than the parsers check: an item or a tool has too many forms to list them all twice.
"""

from __future__ import annotations

from millstream.api.openai.responses.fields import MAX_METADATA, MAX_METADATA_VALUE
from millstream.api.params import Neutrals
from millstream.api.request_docs import NULL, Schema, complete_body
from millstream.parameters import IGNORED, REFUSED, REFUSED_THINKING

UNSUPPORTED: Neutrals = REFUSED | REFUSED_THINKING | {"conversation": (), "prompt": (), "moderation": (), "image": ()}
"""Parameters that this server does not support, each with the values, besides null, that have no effect."""

_TEXT: Schema = {"type": "string"}
_OBJECT: Schema = {"type": "object"}

INPUT: Schema = {"anyOf": [_TEXT, {"type": "array", "items": {"type": "object", "title": "InputItem"}}]}
TOOLS: Schema = {
    "type": "array",
    "items": {"type": "object", "title": "ResponseTool", "required": ["type"], "properties": {"type": _TEXT}},
}
TOOL_CHOICE: Schema = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {"type": "object", "required": ["type"], "properties": {"type": _TEXT}},
    ]
}
TEXT: Schema = {
    "type": "object",
    "properties": {
        "format": {
            "anyOf": [
                NULL,
                {
                    "type": "object",
                    "required": ["type"],
                    "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}},
                },
            ]
        },
        "verbosity": {"description": "Has no effect."},
    },
}
REASONING: Schema = {
    "type": "object",
    "properties": {
        "effort": {"anyOf": [_TEXT, NULL]},
        "summary": {"description": "Show the reasoning as its summary, too."},
    },
}
INCLUDE: Schema = {"type": "array", "items": _TEXT}
METADATA: Schema = {
    "type": "object",
    "maxProperties": MAX_METADATA,
    "additionalProperties": {"type": "string", "maxLength": MAX_METADATA_VALUE},
}


def complete_request(schema: Schema) -> None:
    complete_body(schema, UNSUPPORTED, IGNORED)
