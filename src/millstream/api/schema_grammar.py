"""Structured output by JSON schema, for every dialect."""

from __future__ import annotations

from millstream.errors import BadRequest
from millstream.exact_json import dumps, loads
from millstream.text.grammars.limits import check_schema, check_size
from millstream.types import Grammar

ANY_OBJECT = Grammar("json_schema", '{"type":"object"}')


def schema_grammar(value: object, param: str) -> Grammar:
    """Accepts a schema as an object or as JSON text. Raises `BadRequest` if it is neither, or too large."""
    if isinstance(value, str):
        try:
            value = loads(value)
        except ValueError as error:
            raise BadRequest(f"{param} is not valid JSON: {error}.", param=param) from error
    if value is True:
        value = {}
    if not isinstance(value, dict):
        raise BadRequest(f"{param} must be a JSON schema, which is an object.", param=param)
    check_schema(value, param)
    source = dumps(value).decode()
    check_size(source, param)
    return Grammar("json_schema", source)
