"""Argument values: JSON that models write, and untyped text that is converted by the function's JSON schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millstream.exact_json import Written, dumps_text, loads
from millstream.text.tool_formats.format import NotACall, Schemas, ToolCall

_BOOLEANS = {"true": True, "false": False}
_NULLS = frozenset({"null", "none", "nil"})


def parse_json(text: str) -> Any:
    """Parses JSON and allows line breaks in strings. Raises `NotACall` if the text is not JSON."""
    try:
        return loads(text, strict=False)
    except ValueError as error:
        raise NotACall(str(error)) from error


def to_call(value: object) -> ToolCall:
    """Converts the object that most JSON formats write: a name, and `arguments` or `parameters`."""
    if not isinstance(value, Mapping):
        raise NotACall("a call must be a JSON object")
    function = value.get("function")
    if isinstance(function, Mapping):
        value = function
    name = value.get("name", function)
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = parse_json(arguments)
    return make_call(name, {} if arguments is None else arguments)


def to_calls(value: object) -> list[ToolCall]:
    """Converts one call, or a non-empty list of calls."""
    items = value if isinstance(value, list) else [value]
    if not items:
        raise NotACall("the list of calls is empty")
    return [to_call(item) for item in items]


def make_call(name: object, arguments: object) -> ToolCall:
    """Builds a call. Raises `NotACall` if the name is no string or the arguments are no object."""
    if not isinstance(name, str) or not name.strip():
        raise NotACall("a call must have a name")
    if not isinstance(arguments, Mapping):
        raise NotACall("the arguments must be an object")
    return ToolCall(name.strip().removeprefix("functions."), arguments)


def arguments_json(call: ToolCall) -> str:
    """Returns the arguments as strict JSON. Raises `NotACall` if that is impossible."""
    try:
        text = dumps_text(dict(call.arguments), allow_nan=False)
        text.encode()
        call.name.encode()
    except UnicodeEncodeError:
        raise NotACall("the call contains an unpaired surrogate") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise NotACall(str(error)) from error
    return text


def typed_call(name: str, raw: Mapping[str, str], schemas: Schemas) -> ToolCall:
    """Builds a call from untyped argument values, converted by the function's schema."""
    schema = schemas.get(name.strip(), {})
    properties = schema.get("properties")
    known = properties if isinstance(properties, Mapping) else {}
    values = {key: typed_value(text, known.get(key), closed=bool(known)) for key, text in raw.items()}
    return make_call(name, values)


def typed_value(text: str, schema: object, *, closed: bool = True) -> Any:
    """Converts `text` to the type that the schema asks for. A value that does not fit stays a string, so the client
    sees what the model wrote.

    `closed`: the function's schema lists its parameters. Then a parameter that it does not list becomes an object or
    a list if it is one, and stays a string otherwise.
    """
    types = _types(schema)
    stripped = text.strip()
    if not types:
        return _value_without_schema(text, stripped, closed=closed)
    if "null" in types and stripped.lower() in _NULLS:
        return None
    if "boolean" in types and stripped.lower() in _BOOLEANS:
        return _BOOLEANS[stripped.lower()]
    if types & {"integer", "number"} and (number := _number(stripped, integer="number" not in types)) is not None:
        return number
    if types & {"object", "array"}:
        found = _json_or_none(stripped)
        if isinstance(found, dict if "array" not in types else list if "object" not in types else (dict, list)):
            return found
    return text


def _types(schema: object) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    types: set[str] = set()
    match schema.get("type"):
        case str(one):
            types.add(one.lower())
        case list(several):
            types.update(str(each).lower() for each in several)
    for name in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(name)
        if isinstance(branches, list):
            types.update(*(_types(branch) for branch in branches))
    choices = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if not types and isinstance(choices, list):
        types.update(_type_of(choice) for choice in choices)
    return types


def _type_of(value: object) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _number(text: str, *, integer: bool) -> int | float | None:
    value = _json_or_none(text)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, float) and value.is_integer() and integer:
        return value if isinstance(value, Written) else int(value)
    return None if integer and isinstance(value, float) else value


def _value_without_schema(text: str, stripped: str, *, closed: bool) -> Any:
    value = _json_or_none(stripped)
    if isinstance(value, dict | list) or (not closed and value is not None and not isinstance(value, str)):
        return value
    return text


def _json_or_none(text: str) -> Any:
    """Parses JSON. Returns None if the text is not JSON; NaN and Infinity are not."""
    try:
        return loads(text, strict=False)
    except ValueError:
        return None
