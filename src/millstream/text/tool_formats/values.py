"""Arguments that a format writes without types, read by the function's JSON schema."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from millstream.text.tool_formats.format import NotACall, Schemas, ToolCall

_WORDS = {"true": True, "false": False}
_NOTHING = frozenset({"null", "none", "nil"})


def finite(text: str) -> float:
    """A number. One that is too large for a float is the largest: JSON has no infinity."""
    return max(-sys.float_info.max, min(sys.float_info.max, float(text)))


def load_json(text: str) -> Any:
    """JSON, with line breaks in strings allowed. Raises `NotACall`."""
    try:
        return json.loads(text, strict=False, parse_float=finite, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise NotACall(str(error)) from error


def call_of(value: object) -> ToolCall:
    """A call from the object that most JSON formats write: a name, and arguments under one of two names."""
    if not isinstance(value, Mapping):
        raise NotACall("a call is an object")
    function = value.get("function")
    if isinstance(function, Mapping):
        value = function
    name = value.get("name", function)
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = load_json(arguments)
    return checked(name, {} if arguments is None else arguments)


def calls_of(value: object) -> list[ToolCall]:
    """One call, or a list of them that is not empty."""
    items = value if isinstance(value, list) else [value]
    if not items:
        raise NotACall("an empty list of calls")
    return [call_of(item) for item in items]


def checked(name: object, arguments: object) -> ToolCall:
    if not isinstance(name, str) or not name.strip():
        raise NotACall("a call without a name")
    if not isinstance(arguments, Mapping):
        raise NotACall("arguments are an object")
    return ToolCall(name.strip().removeprefix("functions."), arguments)


def typed(name: str, raw: Mapping[str, str], schemas: Schemas) -> ToolCall:
    """A call whose values are all texts so far."""
    schema = schemas.get(name.strip(), {})
    properties = schema.get("properties")
    known = properties if isinstance(properties, Mapping) else {}
    values = {key: typed_value(text, known.get(key), closed=bool(known)) for key, text in raw.items()}
    return checked(name, values)


def typed_value(text: str, schema: object, *, closed: bool = True) -> Any:
    """`text` as the schema wants it. A value that does not fit stays text: the client sees what the model wrote.

    Where nothing is known of it, only what cannot be a text is read as something else.
    """
    kinds = _kinds(schema)
    plain = text.strip()
    if not kinds:
        return _loose(text, plain, closed=closed)
    if "null" in kinds and plain.lower() in _NOTHING:
        return None
    if "boolean" in kinds and plain.lower() in _WORDS:
        return _WORDS[plain.lower()]
    if kinds & {"integer", "number"} and (number := _number(plain, whole="number" not in kinds)) is not None:
        return number
    if kinds & {"object", "array"}:
        found = _loaded(plain)
        if isinstance(found, dict if "array" not in kinds else list if "object" not in kinds else (dict, list)):
            return found
    return text


def _kinds(schema: object) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    kinds: set[str] = set()
    match schema.get("type"):
        case str(one):
            kinds.add(one.lower())
        case list(several):
            kinds.update(str(kind).lower() for kind in several)
    for name in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(name)
        if isinstance(branches, list):
            kinds.update(*(_kinds(branch) for branch in branches))
    choices = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if not kinds and isinstance(choices, list):
        kinds.update(_kind(choice) for choice in choices)
    return kinds


def _kind(value: object) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _number(text: str, *, whole: bool) -> int | float | None:
    value = _loaded(text)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, float) and value.is_integer() and whole:
        return int(value)
    return None if whole and isinstance(value, float) else value


def _loose(text: str, plain: str, *, closed: bool) -> Any:
    """A value that no schema speaks of: with others spoken of, objects and lists only; else any JSON."""
    value = _loaded(plain)
    if isinstance(value, dict | list) or (not closed and value is not None and not isinstance(value, str)):
        return value
    return text


def _loaded(text: str) -> Any:
    """JSON, or None for anything else; also for numbers that JSON does not have."""
    try:
        return json.loads(text, strict=False, parse_float=finite, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
