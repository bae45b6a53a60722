"""An agent with the demo model, whose template has no tools: a required call is always made."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest

MODEL = "smollm2-135m-instruct"
ROUNDS, SOME = range(50), (1, 2)

OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "add": lambda left, right: left + right,
    "subtract": lambda left, right: left - right,
    "multiply": lambda left, right: left * right,
}
CALCULATE: dict[str, Any] = {
    "name": "calculate",
    "description": "Calculate with two whole numbers.",
    "parameters": {
        "type": "object",
        "properties": {
            "operation": {"type": "string", "enum": list(OPERATIONS)},
            "left": {"type": "integer", "minimum": -999, "maximum": 999},
            "right": {"type": "integer", "minimum": -999, "maximum": 999},
        },
        "required": ["operation", "left", "right"],
        "additionalProperties": False,
    },
}
LOOK_UP: dict[str, Any] = {
    "name": "look_up",
    "description": "Look up a town.",
    "parameters": {
        "type": "object",
        "properties": {"town": {"type": "string", "maxLength": 20}, "year": {"type": ["integer", "null"]}},
        "required": ["town"],
        "additionalProperties": False,
    },
}
TOOLS: list[Any] = [{"type": "function", "function": function} for function in (CALCULATE, LOOK_UP)]


def calculate(operation: str, left: int, right: int) -> str:
    return str(OPERATIONS[operation](left, right))


def look_up(town: str, year: int | None = None) -> str:
    return f"{town} has a mill" + (f" since {year}" if year is not None else "")


SCHEMAS = {function["name"]: function["parameters"] for function in (CALCULATE, LOOK_UP)}
FUNCTIONS: dict[str, Callable[..., str]] = {"calculate": calculate, "look_up": look_up}


def ask(client: openai.OpenAI, stream: bool, messages: list[Any], **more: Any) -> tuple[Any, str | None]:
    fields = {"model": MODEL, "messages": messages, "tools": TOOLS, "temperature": 1.0, **more}
    if not stream:
        (choice,) = client.chat.completions.create(**fields).choices
        return choice.message, choice.finish_reason
    with client.chat.completions.stream(**fields) as events:
        (choice,) = events.get_final_completion().choices
    return choice.message, choice.finish_reason


def one_round(client: openai.OpenAI, number: int) -> str:
    """A question, a required tool call, the function call, and an answer that gets its result."""
    stream = number % 4 > 1
    messages: list[Any] = [{"role": "user", "content": f"What is {number} times {number + 3}?"}]
    choice: Any = "required" if number % 2 else {"type": "function", "function": {"name": "calculate"}}
    more = {"tool_choice": choice, "parallel_tool_calls": False, "seed": number, "max_tokens": 200}
    message, reason = ask(client, stream, messages, **more)
    assert reason == "tool_calls" and not message.content, message
    (call,) = message.tool_calls
    arguments = json.loads(call.function.arguments)
    jsonschema.validate(arguments, SCHEMAS[call.function.name])
    result = FUNCTIONS[call.function.name](**arguments)
    messages += [message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": result}]
    answer, reason = ask(client, False, messages, tool_choice="none", seed=number, max_tokens=8)
    assert answer.tool_calls is None and reason in ("stop", "length")
    return str(call.function.name)


def test_an_agent_calls_a_real_function_every_time(demo_client: openai.OpenAI, whole: bool) -> None:
    """50 times with `--whole`; without, once for each kind of choice, one of them streamed."""
    rounds = ROUNDS if whole else SOME
    with ThreadPoolExecutor(10) as pool:
        names = list(pool.map(functools.partial(one_round, demo_client), rounds))
    assert {name for name, number in zip(names, rounds, strict=True) if number % 2 == 0} == {"calculate"}


def test_several_calls_in_one_answer_are_all_valid(demo_client: openai.OpenAI, whole: bool) -> None:
    for number in range(3 if whole else 1):
        messages = [{"role": "user", "content": "Look up three towns."}]
        message, reason = ask(demo_client, False, messages, tool_choice="required", seed=number, max_tokens=500)
        assert reason == "tool_calls" and 1 <= len(message.tool_calls) <= 8
        assert len({call.id for call in message.tool_calls}) == len(message.tool_calls)
        for call in message.tool_calls:
            FUNCTIONS[call.function.name](**json.loads(call.function.arguments))


def test_a_schema_that_cannot_be_enforced_is_refused(demo_client: openai.OpenAI) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    fields = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": tools}
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        demo_client.chat.completions.create(**fields, tool_choice="required")  # type: ignore[call-overload]
