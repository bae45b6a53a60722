"""Random JSON schemas whose answers are short: bounded strings, arrays and depth."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

WORDS = ["name", "age", "city", "size", "colour", "état", "a b", 'qu"ote', "x", "id"]
PATTERNS = [
    r"^[a-z]{2,6}$",
    r"^[A-Z]{3}-\d{2,4}$",
    r"^(red|green|blue)$",
    r"^\d{4}-\d{2}-\d{2}$",
    r"^#[0-9a-f]{6}$",
    r"^v\d+\.\d$",
    r"^[^\s@]{1,8}@[a-z]{1,8}\.com$",
]
FORMATS = ["date", "time", "date-time", "ipv4", "uuid"]


def random_schema(seed: int) -> Schema:
    """Of any type at the top, objects mostly: that is what people ask for."""
    rng = random.Random(seed)
    return _object(rng, 2) if rng.random() < 0.7 else _value(rng, 2)


def _value(rng: random.Random, depth: int) -> Schema:
    simple = [_string, _pattern, _integer, _number, _enum, _const, _boolean, _nullable, _format]
    nested = [_object, _array, _union, _tuple, _exclusive, _reference, _all, _map]
    kinds = simple + (nested * 2 if depth > 0 else [])
    return rng.choice(kinds)(rng, depth - 1)


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(WORDS, rng.randint(1, 4))
    required = rng.sample(names, rng.randint(0, len(names)))
    return {
        "type": "object",
        "properties": {name: _value(rng, depth) for name in names},
        "required": required,
        "additionalProperties": False,
    }


def _map(rng: random.Random, depth: int) -> Schema:
    most = rng.randint(1, 3)
    # As a pattern, because keys of any length may be long.
    return {
        "type": "object",
        "patternProperties": {"^[a-z]{1,4}$": _value(rng, 0)},
        "additionalProperties": False,
        "maxProperties": most,
    }


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    return {"type": "array", "items": _value(rng, depth), "minItems": least, "maxItems": least + rng.randint(0, 2)}


def _tuple(rng: random.Random, depth: int) -> Schema:
    items = [_value(rng, depth) for _ in range(rng.randint(1, 3))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _union(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_value(rng, depth) for _ in range(rng.randint(2, 3))]}


def _exclusive(rng: random.Random, depth: int) -> Schema:
    """Told apart by a constant, as pydantic writes it."""

    def option(kind: str) -> Schema:
        return {
            "type": "object",
            "properties": {"kind": {"const": kind}, "value": _value(rng, depth)},
            "required": ["kind", "value"],
            "additionalProperties": False,
        }

    return {"oneOf": [option(kind) for kind in ("cat", "dog")]}


def _all(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(-50, 50)
    return {"allOf": [{"type": "integer", "minimum": low}, {"maximum": low + rng.randint(0, 500)}]}


def _reference(rng: random.Random, depth: int) -> Schema:
    """By a pointer within itself; `$defs` stand where they are used, under an id of their own."""
    number = rng.randint(0, 10**9)
    return {
        "$id": f"urn:schema:{number}",
        "$defs": {"item": _value(rng, 0)},
        "type": "array",
        "items": {"$ref": f"urn:schema:{number}#/$defs/item"},
        "maxItems": 2,
    }


def _string(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 4)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 12)}


def _pattern(rng: random.Random, depth: int) -> Schema:
    return {"type": "string", "pattern": rng.choice(PATTERNS)}


def _format(rng: random.Random, depth: int) -> Schema:
    return {"type": "string", "format": rng.choice(FORMATS)}


def _integer(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(-1000, 1000)
    bounds = rng.choice(["minimum", "exclusiveMinimum"]), rng.choice(["maximum", "exclusiveMaximum"])
    schema: Schema = {"type": "integer", bounds[0]: low, bounds[1]: low + rng.randint(2, 5000)}
    return schema | ({"multipleOf": rng.choice([2, 3])} if rng.random() < 0.2 and low + 5 < schema[bounds[1]] else {})


def _number(rng: random.Random, depth: int) -> Schema:
    low = round(rng.uniform(-10, 10), 2)
    bounds = rng.choice(["minimum", "exclusiveMinimum"]), rng.choice(["maximum", "exclusiveMaximum"])
    return {"type": "number", bounds[0]: low, bounds[1]: round(low + rng.uniform(0.5, 20), 2)}


def _enum(rng: random.Random, depth: int) -> Schema:
    pool: list[Any] = ["small", "großer Wert", "tab\there", 'a "b"', 7, -1.5, True, None, [1, 2], {"k": "v"}]
    return {"enum": rng.sample(pool, rng.randint(2, 4))}


def _const(rng: random.Random, depth: int) -> Schema:
    return {"const": rng.choice(["fixed", 42, False, {"deep": ["er", None]}])}


def _boolean(rng: random.Random, depth: int) -> Schema:
    return {"type": "boolean"}


def _nullable(rng: random.Random, depth: int) -> Schema:
    return {"type": ["integer", "null"], "minimum": 0, "maximum": rng.randint(1, 10**6)}
