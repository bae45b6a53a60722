"""How much to reason, and whether to return it: OpenAI's parameters, and those of other servers for the same thing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from millstream.api.efforts import EFFORTS, parse_effort
from millstream.api.numbers import Whole, whole
from millstream.errors import BadRequest
from millstream.types import Thinking

_INT32 = 2**31 - 1
_EFFORT: dict[str, Any] = {"enum": list(EFFORTS)}
_BUDGET: dict[str, Any] = {"type": ["integer", "null"], "minimum": 0, "maximum": _INT32}
_FLAG: dict[str, Any] = {"type": ["boolean", "null"]}
_KINDS = ("enabled", "disabled", "adaptive", "auto")


def _parse_effort(value: object) -> str | None:
    return parse_effort(value, "reasoning_effort")


def _budget(value: object, path: str) -> int | None:
    value = whole(value)
    if value is None or (type(value) is int and 0 <= value <= _INT32):
        return value
    raise BadRequest(f"{path} must be an integer of at least 0.", param=path)


def _flag(value: object, path: str) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    raise BadRequest(f"{path} must be true or false.", param=path)


@dataclass(frozen=True, slots=True)
class ReasoningOptions:
    """What one parameter says. None: nothing."""

    effort: str | None = None
    budget: int | None = None
    enabled: bool | None = None
    shown: bool | None = None


def parse_thinking(value: object) -> ReasoningOptions:
    """Anthropic's object, as litellm and other servers pass it on, or a flag."""
    if isinstance(value, bool):
        return ReasoningOptions(enabled=value)
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or kind not in _KINDS:
        raise BadRequest(f"thinking must be an object with a type: {', '.join(_KINDS)}.", param="thinking")
    budget = _budget(value.get("budget_tokens"), "thinking.budget_tokens")
    if kind == "disabled":
        return ReasoningOptions(enabled=False)
    return ReasoningOptions(budget=budget, enabled=True if kind == "enabled" else None)


def parse_reasoning(value: object) -> ReasoningOptions:
    """OpenRouter's object. Fields that it does not have are ignored."""
    if not isinstance(value, dict):
        raise BadRequest('reasoning must be an object, such as {"effort": "low"}.', param="reasoning")
    effort = value.get("effort")
    exclude = _flag(value.get("exclude"), "reasoning.exclude")
    return ReasoningOptions(
        effort=None if effort is None else parse_effort(effort, "reasoning.effort"),
        budget=_budget(value.get("max_tokens"), "reasoning.max_tokens"),
        enabled=_flag(value.get("enabled"), "reasoning.enabled"),
        shown=None if exclude is None else not exclude,
    )


_THINKING = {
    "anyOf": [
        {"type": "boolean"},
        {
            "type": "object",
            "required": ["type"],
            "properties": {"type": {"enum": list(_KINDS)}, "budget_tokens": _BUDGET},
        },
    ]
}
_REASONING = {
    "type": "object",
    "properties": {
        "effort": {"enum": [None, *EFFORTS]},
        "max_tokens": _BUDGET,
        "enabled": _FLAG,
        "exclude": _FLAG,
    },
}
Effort = Annotated[str | None, PlainValidator(_parse_effort), WithJsonSchema(_EFFORT)]
ThinkingObject = Annotated[ReasoningOptions, PlainValidator(parse_thinking), WithJsonSchema(_THINKING)]
ReasoningObject = Annotated[ReasoningOptions, PlainValidator(parse_reasoning), WithJsonSchema(_REASONING)]


_UNSET = ReasoningOptions()


class ThinkingRequest(BaseModel):
    """The parameters for reasoning, under every name in use."""

    model_config = ConfigDict(strict=True, use_attribute_docstrings=True)

    reasoning_effort: Effort = None
    """How much to reason before the final output. none: no reasoning, where the model allows that."""
    thinking_budget: Annotated[Whole, Field(ge=0, le=_INT32)] | None = None
    """Maximum number of reasoning tokens; after that, the reasoning is closed by force."""
    enable_thinking: bool | None = None
    """False: no reasoning, where the model allows that. True: reasoning, where the model's template can turn it on."""
    thinking: ThinkingObject | None = None
    """Anthropic's form of enable_thinking and thinking_budget."""
    reasoning: ReasoningObject | None = None
    """OpenRouter's form of reasoning_effort, thinking_budget, enable_thinking and include_reasoning."""
    include_reasoning: bool | None = None
    """False: the reasoning is left out of the response."""

    def reasoning_options(self) -> ReasoningOptions:
        """Merges all parameters. Raises `BadRequest` if two of them disagree."""
        if self.model_fields_set.isdisjoint(ThinkingRequest.model_fields):
            return _UNSET
        thinking, reasoning = self.thinking or ReasoningOptions(), self.reasoning or ReasoningOptions()
        return ReasoningOptions(
            effort=_only({"reasoning_effort": self.reasoning_effort, "reasoning.effort": reasoning.effort}),
            budget=_only(
                {
                    "thinking_budget": self.thinking_budget,
                    "thinking.budget_tokens": thinking.budget,
                    "reasoning.max_tokens": reasoning.budget,
                }
            ),
            enabled=_only(
                {
                    "enable_thinking": self.enable_thinking,
                    "thinking.type": thinking.enabled,
                    "reasoning.enabled": reasoning.enabled,
                }
            ),
            shown=_only({"include_reasoning": self.include_reasoning, "reasoning.exclude": reasoning.shown}),
        )


def _only(values: dict[str, Any]) -> Any:
    """Returns the value that is given, if any."""
    given = {name: value for name, value in values.items() if value is not None}
    if not given:
        return None
    (first, value), *others = given.items()
    for name, other in others:
        if other != value:
            raise BadRequest(f"{first} and {name} disagree. Send one of them.", param=name)
    return value


def thinking_of(options: ReasoningOptions) -> Thinking:
    if options.enabled is False:
        return Thinking("none")
    return Thinking(options.effort, options.budget)


def template_flags(options: ReasoningOptions) -> dict[str, object]:
    """Returns the variables by which templates turn reasoning on. There are two names; each template knows one."""
    return {"enable_thinking": True, "thinking": True} if options.enabled and options.effort is None else {}
