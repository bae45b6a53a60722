"""Structured output by JSON schema, for every dialect."""

from __future__ import annotations

import orjson

from millstream.errors import BadRequest
from millstream.text.grammars.limits import check_schema, check_size
from millstream.types import Grammar

ANY_OBJECT = Grammar("json_schema", '{"type":"object"}')


def schema_grammar(value: object, param: str) -> Grammar:
    """Accepts a schema as an object or as JSON text. Raises `BadRequest` if it is neither, or too large."""
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise BadRequest(f"{param} is not valid JSON: {error.msg}.", param=param) from error
    if value is True:
        value = {}
    if not isinstance(value, dict):
        raise BadRequest(f"{param} must be a JSON schema, which is an object.", param=param)
    check_schema(value, param)
    source = orjson.dumps(value).decode()
    check_size(source, param)
    return Grammar("json_schema", source)
