"""Checks values against a JSON schema, as far as it takes to tell a tool call from an answer that happens to be JSON.

Types, required properties, unknown properties, lists and enumerations are checked. Everything else fits: limits on
numbers or lengths do not tell what the model meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MAX_DEPTH = 64
"""Levels that are checked. A schema may refer to itself."""

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


def arguments_fit(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> bool:
    """True if a call's arguments match the schema of the function's parameters.

    Parameters that the schema does not list do not fit, unless it allows them explicitly.
    """
    properties = schema.get("properties")
    known = properties if isinstance(properties, dict) else {}
    if not schema.get("additionalProperties", "properties" not in schema) and not arguments.keys() <= known.keys():
        return False
    return _fits(dict(arguments), schema, schema, _MAX_DEPTH)


def _fits(value: Any, schema: object, root: Mapping[str, Any], depth: int) -> bool:
    if not isinstance(schema, Mapping):
        return schema is not False
    if depth == 0:
        return False
    if "$ref" in schema and not _fits(value, _resolved(schema["$ref"], root), root, depth - 1):
        return False
    if not _has_type(value, schema.get("type")) or not _is_listed(value, schema):
        return False
    for name, test in (("anyOf", any), ("oneOf", any), ("allOf", all)):
        branches = schema.get(name)
        if isinstance(branches, list) and not test(_fits(value, branch, root, depth - 1) for branch in branches):
            return False
    if isinstance(value, dict):
        return _has_properties(value, schema, root, depth)
    if isinstance(value, list) and "items" in schema:
        return all(_fits(item, schema["items"], root, depth - 1) for item in value)
    return True


def _has_type(value: Any, types: object) -> bool:
    names = [types] if isinstance(types, str) else types
    if not isinstance(names, list):
        return True
    return any(_is_of_type(value, str(name)) for name in names)


def _is_of_type(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES.get(name, (object,)))


def _is_listed(value: Any, schema: Mapping[str, Any]) -> bool:
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not isinstance(choices, list):
        return True
    return any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in choices)


def _has_properties(value: dict[str, Any], schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> bool:
    required = schema.get("required")
    if isinstance(required, list) and not all(name in value for name in required):
        return False
    properties = schema.get("properties")
    known = properties if isinstance(properties, dict) else {}
    return all(_fits(value[name], known[name], root, depth - 1) for name in value.keys() & known.keys())


def _resolved(reference: object, root: Mapping[str, Any]) -> object:
    """Returns the schema that a reference within the root schema names. All values fit other references."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return True
    found: object = root
    for name in reference.removeprefix("#").split("/")[1:]:
        found = found.get(name.replace("~1", "/").replace("~0", "~"), True) if isinstance(found, Mapping) else True
    return found
