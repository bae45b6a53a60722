"""Size limits of grammars. They are checked before a library sees the grammar, in linear time and without recursion."""

from __future__ import annotations

from millstream.errors import BadRequest

MAX_BYTES = 262_144
"""Bytes of a grammar's source. Schemas of real programs are far smaller."""
MAX_TOOL_BYTES = 4 * MAX_BYTES
"""Characters in the schema of one tool, including its descriptions."""
MAX_DEPTH = 100
"""Levels of nested objects and lists in a schema; `properties` is a level, too. llguidance's limit is 128."""
MAX_VALUES = 30_000
"""JSON values in a schema."""
MAX_PROPERTIES = 1_000
"""Properties of one object: llguidance's compile time grows with their square."""
MAX_CHOICES = 10_000
"""Strings in a choice."""


def check_schema(schema: object, name: str, *, max_bytes: int = MAX_BYTES) -> None:
    """Raises `BadRequest` if a schema exceeds a limit. The message says which one. `name` is the request parameter."""
    level = [schema]
    values = size = depth = 0
    while level:
        depth += 1
        values += len(level)
        _check(values, MAX_VALUES, name, "values", "or more")
        _check(depth - 1, MAX_DEPTH, name, "levels of nesting", "or more")
        below: list[object] = []
        for value in level:
            if isinstance(value, dict):
                _check_properties(value, name)
                _check(values + len(below) + len(value), MAX_VALUES, name, "values", "or more")
                size += sum(map(len, value))
                below.extend(value.values())
            elif isinstance(value, list | tuple):
                _check(values + len(below) + len(value), MAX_VALUES, name, "values", "or more")
                below.extend(value)
            elif isinstance(value, str):
                size += len(value)
        _check(size, max_bytes, name, "characters", "or more")
        level = below


def check_size(source: str, name: str) -> None:
    """Raises `BadRequest` if the source is longer than `MAX_BYTES`."""
    _check(len(source) if source.isascii() else len(source.encode(errors="replace")), MAX_BYTES, name, "bytes")


def _check_properties(schema: dict[object, object], name: str) -> None:
    properties = schema.get("properties")
    if isinstance(properties, dict):
        _check(len(properties), MAX_PROPERTIES, name, "properties in one object")


def _check(found: int, limit: int, name: str, what: str, more: str = "") -> None:
    if found > limit:
        count = f"{found} {more}".rstrip()
        raise BadRequest(f"{name} has {count} {what}; at most {limit} are allowed. Make it smaller.", param=name)
