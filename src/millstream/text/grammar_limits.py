"""How large a grammar may be, checked before any library sees it: linear, without recursion, and it stops early."""

from __future__ import annotations

from millstream.errors import BadRequest

MAX_BYTES = 262_144
"""Of a grammar's source. Schemas of real programs are far below it."""
MAX_TOOL_BYTES = 4 * MAX_BYTES
"""Of the schemas of all tools together, with their descriptions."""
MAX_DEPTH = 100
"""Levels of objects and lists in a schema's JSON; `properties` is a level too. llguidance reads 128."""
MAX_VALUES = 30_000
"""Values in a schema's JSON."""
MAX_PROPERTIES = 1_000
"""Of one object: llguidance's work grows with their square."""
MAX_CHOICES = 10_000


def check_schema(schema: object, name: str, *, most_bytes: int = MAX_BYTES) -> None:
    """Raises `BadRequest` that says which limit is exceeded, and by how much. `name`: the parameter that holds it."""
    level = [schema]
    values = size = depth = 0
    while level:
        depth += 1
        values += len(level)
        _refuse(values, MAX_VALUES, name, "values", "or more")
        _refuse(depth - 1, MAX_DEPTH, name, "levels of nesting", "or more")
        below: list[object] = []
        for value in level:
            if isinstance(value, dict):
                _check_properties(value, name)
                _refuse(values + len(below) + len(value), MAX_VALUES, name, "values", "or more")
                size += sum(map(len, value))
                below.extend(value.values())
            elif isinstance(value, list | tuple):
                _refuse(values + len(below) + len(value), MAX_VALUES, name, "values", "or more")
                below.extend(value)
            elif isinstance(value, str):
                size += len(value)
        _refuse(size, most_bytes, name, "characters", "or more")
        level = below


def check_size(source: str, name: str) -> None:
    """Raises `BadRequest` for a source that is too long."""
    _refuse(len(source) if source.isascii() else len(source.encode(errors="replace")), MAX_BYTES, name, "bytes")


def _check_properties(schema: dict[object, object], name: str) -> None:
    properties = schema.get("properties")
    if isinstance(properties, dict):
        _refuse(len(properties), MAX_PROPERTIES, name, "properties in one object")


def _refuse(found: int, most: int, name: str, what: str, more: str = "") -> None:
    if found > most:
        count = f"{found} {more}".rstrip()
        raise BadRequest(f"{name} has {count} {what}; at most {most} are served. Make it smaller.", param=name)
