"""Parses `thinking` and `output_config`: how much the model reasons, whether the client sees it, structured output."""

from __future__ import annotations

from typing import Any

from millstream.api.efforts import parse_effort
from millstream.api.schema_grammar import schema_grammar
from millstream.errors import BadRequest
from millstream.types import Grammar, Thinking

KINDS = ("enabled", "disabled", "adaptive", "between_tools")
DISPLAYS = ("summarized", "omitted")
MAX_BUDGET = 2**31 - 1

_ENABLED_EFFORT = "medium"
"""Templates that know efforts have this default; others reason only if there is an effort."""


def parse_thinking(value: object, output_config: dict[str, Any]) -> Thinking:
    """`thinking` counts before the effort, where both say how much to reason."""
    effort = output_config.get("effort")
    word = None if effort is None else parse_effort(effort, "output_config.effort")
    if value is None:
        return Thinking(word)
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or kind not in KINDS:
        raise BadRequest(f"thinking must be an object with a type: {', '.join(KINDS)}.", param="thinking")
    display = value.get("display")
    if display is not None and display not in DISPLAYS:
        raise BadRequest(f"thinking.display must be {' or '.join(DISPLAYS)}.", param="thinking.display")
    if kind == "disabled":
        return Thinking("none")
    if kind == "enabled":
        return Thinking(word or _ENABLED_EFFORT, _budget(value.get("budget_tokens")))
    return Thinking(word)


def _budget(value: object) -> int | None:
    if value is None:
        return None
    if type(value) is not int or not 0 <= value <= MAX_BUDGET:
        param = "thinking.budget_tokens"
        raise BadRequest(f"{param} must be an integer of at least 0.", param=param)
    return value


def shows_thinking(value: object) -> bool:
    """False if the client wants the signature of the reasoning only. `parse_thinking` has checked the value."""
    return not isinstance(value, dict) or value.get("display") != "omitted"


def output_grammar(output_config: dict[str, Any], output_format: object) -> Grammar | None:
    """Structured output, by `output_config.format` or by its older name."""
    current = output_config.get("format")
    if current is not None:
        return _grammar(current, "output_config.format")
    return None if output_format is None else _grammar(output_format, "output_format")


def _grammar(value: object, param: str) -> Grammar:
    if not isinstance(value, dict) or value.get("type") != "json_schema":
        raise BadRequest(f'{param} must be {{"type": "json_schema", "schema": {{...}}}}.', param=param)
    return schema_grammar(value.get("schema"), f"{param}.schema")
