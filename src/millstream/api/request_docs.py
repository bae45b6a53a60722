"""Request bodies in /openapi.json: what all dialects add to the schemas that Pydantic writes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from millstream.api.params import Neutrals

Schema = dict[str, Any]

NULL: Schema = {"type": "null"}
_ANNOTATIONS = ("title", "description", "default", "examples", "deprecated")


def nullable(*options: Schema) -> Schema:
    return {"anyOf": [*options, NULL]}


def complete_body(schema: Schema, unsupported: Neutrals, ignored: Collection[str] = ()) -> None:
    """Completes the schema of a body: null means "not given", unsupported parameters accept neutral values only, and
    others are ignored."""
    properties, required = schema["properties"], schema.get("required", ())
    for name, field in properties.items():
        if name not in required:
            properties[name] = _optional(field)
    for name, neutrals in unsupported.items():
        if name not in properties:
            properties[name] = {
                "enum": [None, *neutrals],
                "description": "Not supported. Only values without effect are accepted.",
            }
    if names := ", ".join(sorted(name for name in ignored if name not in properties)):
        told = f"{schema.get('description', '')} Parameters without effect are accepted: {names}."
        schema["description"] = told.strip()
    # True, but for names that resemble one of these: they are taken for typos, which a schema cannot say.
    schema["additionalProperties"] = True


def _optional(field: Schema) -> Schema:
    if NULL in field.get("anyOf", ()):
        return field
    notes = {key: field[key] for key in _ANNOTATIONS if key in field}
    rules = {key: value for key, value in field.items() if key not in notes}
    if not rules:
        return field  # any value
    options = rules["anyOf"] if rules.keys() == {"anyOf"} else [rules]
    return nullable(*options) | notes
