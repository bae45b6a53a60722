"""Parsers of parameters that have a structure of their own."""

from __future__ import annotations

from typing import Any

from millstream.api.efforts import parse_effort
from millstream.api.schema_grammar import ANY_OBJECT, schema_grammar
from millstream.errors import BadRequest
from millstream.types import Grammar

MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512


def parse_input(value: object) -> list[Any]:
    """Returns items. A plain text is one message of the user."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": value}]}]
    if not isinstance(value, list):
        raise BadRequest("input must be a string or a list of items.", param="input")
    return value


def parse_include(value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise BadRequest("include must be a list of strings.", param="include")
    return value


def parse_metadata(value: object) -> dict[str, str]:
    if not isinstance(value, dict) or len(value) > MAX_METADATA:
        raise BadRequest(f"metadata must be an object with at most {MAX_METADATA} strings.", param="metadata")
    for key, text in value.items():
        if len(key) > MAX_METADATA_KEY:
            raise BadRequest(f"Keys of metadata have at most {MAX_METADATA_KEY} characters.", param="metadata")
        if not isinstance(text, str) or len(text) > MAX_METADATA_VALUE:
            raise BadRequest(
                f"metadata.{key} must be a string of at most {MAX_METADATA_VALUE} characters.", param=f"metadata.{key}"
            )
    return value


def parse_reasoning(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadRequest("reasoning must be an object.", param="reasoning")
    reasoning_effort(value)
    return value


def reasoning_effort(reasoning: dict[str, Any]) -> str | None:
    effort = reasoning.get("effort")
    return None if effort is None else parse_effort(effort, "reasoning.effort")


def parse_text(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadRequest("text must be an object.", param="text")
    text_grammar(value)
    return value


def text_grammar(text: dict[str, Any]) -> Grammar | None:
    """The grammar that `text.format` asks for."""
    value, path = text.get("format"), "text.format"
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or kind not in ("text", "json_object", "json_schema"):
        raise BadRequest(f'{path} must be an object with a type: "text", "json_object" or "json_schema".', param=path)
    if kind != "json_schema":
        return ANY_OBJECT if kind == "json_object" else None
    nested = value.get("json_schema")  # the form of the chat API
    inner, path = (nested, f"{path}.json_schema") if isinstance(nested, dict) else (value, path)
    schema = inner.get("schema")
    if schema is None:
        raise BadRequest(f"{path}.schema is required.", param=f"{path}.schema")
    # Enforced with or without `strict`: a schema is more than a hint here.
    return schema_grammar(schema, f"{path}.schema")
