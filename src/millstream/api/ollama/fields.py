"""Parsers for fields that clients of Ollama's API send in several forms."""

from __future__ import annotations

import math
import re
from typing import Any

from millstream.api.efforts import EFFORTS, parse_effort
from millstream.api.schema_grammar import ANY_OBJECT, schema_grammar
from millstream.errors import BadRequest
from millstream.types import Grammar

Schema = dict[str, Any]

FOREVER_SECONDS = 10 * 365 * 24 * 3600.0
"""A time that is longer than this counts as for ever."""

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_STEP = r"[0-9]{1,12}(?:\.[0-9]{0,12})?(?:ns|us|µs|ms|s|m|h)"
_NUMBER = r"[0-9]{1,12}(?:\.[0-9]{0,12})?"
_DURATION = re.compile(rf"[+-]?(?:(?:{_STEP}){{1,6}}|{_NUMBER})")
_STEPS = re.compile(r"([0-9.]+)([a-zµ]*)")

KEEP_ALIVE: Schema = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": f"^{_DURATION.pattern}$"}]}
FORMAT: Schema = {"anyOf": [{"enum": ["", "json"]}, {"type": "object"}]}
THINK: Schema = {"anyOf": [{"type": "boolean"}, {"enum": list(EFFORTS)}]}


def parse_keep_alive(value: object) -> float:
    """Returns seconds: of a number, or of a text such as `5m` or `1h30m`. Negative means for ever."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    elif isinstance(value, str) and _DURATION.fullmatch(value.strip()):
        text = value.strip()
        seconds = sum(float(number) * _UNITS[unit or "s"] for number, unit in _STEPS.findall(text))
        seconds = -seconds if text.startswith("-") else seconds
    else:
        raise BadRequest(
            "keep_alive must be a number of seconds or a duration such as 5m or 1h30m; -1 keeps the model loaded, and "
            "0 unloads it after this request.",
            param="keep_alive",
        )
    return math.inf if seconds < 0 or not seconds < FOREVER_SECONDS else seconds


def parse_format(value: object) -> Grammar | None:
    if value == "":
        return None
    if value == "json":
        return ANY_OBJECT
    if isinstance(value, dict):
        return schema_grammar(value, "format")
    raise BadRequest('format must be "json" or a JSON schema, which is an object.', param="format")


def parse_think(value: object) -> bool | str | None:
    if isinstance(value, bool):
        return value
    if not isinstance(value, str):
        raise BadRequest(f"think must be true, false or one of {', '.join(EFFORTS)}.", param="think")
    return parse_effort(value, "think")
