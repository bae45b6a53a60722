"""JSON schemas of request fields that our own functions parse. Schemathesis tests one against the other.

Unknown fields of messages, blocks and tools are ignored, so that clients can send back what they got.
"""

from __future__ import annotations

from millstream.api.anthropic.content import HOSTED as HOSTED_BLOCK
from millstream.api.anthropic.messages import ROLES
from millstream.api.anthropic.thinking import DISPLAYS, KINDS, MAX_BUDGET
from millstream.api.anthropic.tools import HOSTED as HOSTED_TOOL
from millstream.api.functions import NAME_PATTERN
from millstream.api.params import Neutrals
from millstream.api.request_docs import NULL, Schema, complete_body, nullable
from millstream.parameters import IGNORED, REFUSED, REFUSED_THINKING

UNSUPPORTED: Neutrals = REFUSED | REFUSED_THINKING | {"mcp_servers": ([],), "container": (), "thread": ()}
"""Parameters that this server does not support, each with the values, besides null, that have no effect."""

_TEXT: Schema = {"type": "string"}
_BOOLEAN: Schema = {"type": "boolean"}


def _object(kind: str | None, required: list[str], **properties: Schema) -> Schema:
    """An object with a type of this name."""
    if kind is None:
        return {"type": "object", "required": required, "properties": properties}
    return {
        "title": kind,
        "type": "object",
        "required": ["type", *required],
        "properties": {"type": {"const": kind}, **properties},
    }


_IMAGE_SOURCE: Schema = {
    "anyOf": [
        _object(
            "base64",
            ["media_type", "data"],
            media_type={"type": "string", "pattern": "^image/[a-z0-9.+-]{1,40}$"},
            data={"type": "string", "minLength": 1},
        ),
        _object("url", ["url"], url={"type": "string", "minLength": 1}),
    ]
}
_TEXT_BLOCK = _object("text", ["text"], text=_TEXT)
_TEXT_BLOCKS: Schema = {"type": "array", "items": _TEXT_BLOCK}
_DOCUMENT_SOURCE: Schema = {
    "anyOf": [
        _object("text", ["data"], data=_TEXT),
        _object("content", ["content"], content={"anyOf": [_TEXT, _TEXT_BLOCKS]}),
    ]
}
_PARTS: list[Schema] = [
    _TEXT_BLOCK,
    _object("image", ["source"], source=_IMAGE_SOURCE),
    _object("document", ["source"], source=_DOCUMENT_SOURCE, title=nullable(_TEXT), context=nullable(_TEXT)),
    _object("search_result", ["content"], content=_TEXT_BLOCKS, source=nullable(_TEXT), title=nullable(_TEXT)),
    _object("tool_reference", ["tool_name"], tool_name=_TEXT),
    _object("compaction", [], content=nullable(_TEXT)),
    {
        "title": "hosted",
        "description": "A call that ran at Anthropic, or its result: the model sees it as text.",
        "type": "object",
        "required": ["type"],
        "properties": {"type": {"type": "string", "pattern": f"^(?:{HOSTED_BLOCK.pattern})$"}},
    },
]
_RESULT_BLOCK: Schema = {
    "description": "A block of the type text, image, document, search_result or tool_reference.",
    "type": "object",
    "required": ["type"],
    "properties": {"type": _TEXT},
}
_BLOCKS: list[Schema] = [
    *_PARTS,
    _object(
        "tool_result",
        ["tool_use_id"],
        tool_use_id=_TEXT,
        content=nullable(_TEXT, {"type": "array", "items": _RESULT_BLOCK}),
        is_error={"description": "True: the model is told that the call failed."},
    )
    | {"description": "In user messages."},
    _object("tool_use", ["id", "name"], id=_TEXT, name=_TEXT, input={"type": "object"})
    | {"description": "In assistant messages."},
    _object("thinking", [], thinking=nullable(_TEXT), signature=nullable(_TEXT))
    | {"description": "In assistant messages."},
    _object("redacted_thinking", ["data"], data=_TEXT) | {"description": "In assistant messages."},
]
MESSAGES: Schema = {
    "type": "array",
    "minItems": 1,
    "items": {
        "title": "Message",
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "role": {"enum": list(ROLES)},
            "content": {"anyOf": [_TEXT, {"type": "array", "items": {"anyOf": _BLOCKS}}]},
        },
    },
}
SYSTEM: Schema = {"anyOf": [_TEXT, _TEXT_BLOCKS]}

_INPUT_SCHEMA: Schema = {
    "type": "object",
    "description": "A JSON schema of the arguments.",
    "properties": {
        "type": {"const": "object"},
        "properties": {"type": "object", "additionalProperties": {"type": ["object", "boolean"]}},
        "required": {"type": "array", "items": _TEXT},
    },
}
_CUSTOM: Schema = {
    "title": "custom",
    "type": "object",
    "required": ["name"],
    "properties": {
        "type": {"enum": ["custom", None]},
        "name": {"type": "string", "pattern": f"^{NAME_PATTERN}$"},
        "description": nullable(_TEXT),
        "input_schema": nullable(_INPUT_SCHEMA),
    },
}
_HOSTED: Schema = {
    "title": "hosted",
    "description": "A tool that Anthropic defines. The model sees bash, text_editor and memory; others are left out.",
    "type": "object",
    "required": ["type"],
    "properties": {"type": {"type": "string", "pattern": f"^(?:{HOSTED_TOOL.pattern})$"}},
}
TOOLS: Schema = {"type": "array", "items": {"anyOf": [_CUSTOM, _HOSTED]}}
_SINGLE = {"disable_parallel_tool_use": nullable(_BOOLEAN)}
TOOL_CHOICE: Schema = {
    "anyOf": [
        *(_object(kind, [], **_SINGLE) for kind in ("auto", "any", "none")),
        _object("tool", ["name"], name=_TEXT, **_SINGLE),
    ]
}
THINKING: Schema = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"enum": list(KINDS)},
        "budget_tokens": {"description": f"With enabled: reasoning tokens, 0 to {MAX_BUDGET}."},
        "display": {"enum": [*DISPLAYS, None], "description": "omitted: the signature only."},
    },
}
OUTPUT_FORMAT: Schema = _object(
    "json_schema", ["schema"], schema={"anyOf": [{"type": "object"}, _TEXT, {"const": True}]}
)
OUTPUT_CONFIG: Schema = {
    "type": "object",
    "properties": {
        "effort": {"anyOf": [_TEXT, NULL], "description": "none, minimal, low, medium, high, xhigh or max."},
        "format": nullable(OUTPUT_FORMAT),
    },
}


def complete_request(schema: Schema) -> None:
    complete_body(schema, UNSUPPORTED, IGNORED)
