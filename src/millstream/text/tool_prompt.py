"""Tools for models whose templates know none: told in a system message, and calls and results written as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from millstream.text.template import Message
from millstream.text.tool_formats.format import Written

_RULES = """You can call functions. Their names and parameters, as JSON schemas:

{tools}

To call a function, write nothing but this, with the function's name and its arguments:

{example}

What it returns is then told to you between <tool_response> and </tool_response>. Call only functions of this list, \
and only where they help; otherwise answer in your own words."""


def write_calls(written: Written, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Calls as a model would write them."""
    each = [
        written.before.replace("{name}", name) + _arguments(written, arguments) + written.after
        for name, arguments in calls
    ]
    return written.opening + written.between.join(each) + written.closing


def _arguments(written: Written, arguments: Mapping[str, Any]) -> str:
    keyed = written.arguments
    if keyed is None:
        return json.dumps(arguments, ensure_ascii=False)
    items = []
    for key, value in arguments.items():
        plain = isinstance(value, str) and keyed.quote != '"'
        text = f"{keyed.quote}{value}{keyed.quote}" if plain else json.dumps(value, ensure_ascii=False)
        items.append(keyed.before.replace("{key}", key) + text + keyed.after)
    return keyed.between.join(items)


def instructions(written: Written, tools: Sequence[Mapping[str, Any]]) -> str:
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = write_calls(written, [("name-of-function", {"name-of-parameter": "value"})])
    return _RULES.replace("{tools}", listed).replace("{example}", example)


def told(messages: Sequence[Message], written: Written, tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The conversation with the tools in its system message, and no roles or fields that only tools have."""
    rules = [instructions(written, tools)] if tools else []
    plain = [_plain(message, written) for message in messages]
    if plain and plain[0]["role"] == "system":
        first = {**plain[0], "content": "\n\n".join([str(plain[0]["content"] or ""), *rules])}
        return [first, *plain[1:]]
    return [{"role": "system", "content": text} for text in rules] + plain


def merged_system(messages: Sequence[Message]) -> list[Message] | None:
    """For templates that refuse a system message: its text begins the first message of the user."""
    if len(messages) < 2 or messages[0]["role"] != "system" or messages[1]["role"] != "user":
        return None
    system, user = messages[0], messages[1]
    return [{**user, "content": f"{system['content']}\n\n{user['content']}"}, *messages[2:]]


def with_written_calls(message: Message, written: Written) -> Message:
    """An assistant's calls as the text that they were, for templates that do not look at calls."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    text = write_calls(written, [_call(call["function"]) for call in calls])
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": "\n".join(part for part in (message.get("content"), text) if isinstance(part, str))}


def _plain(message: Message, written: Written) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"}
    return with_written_calls(message, written)


def _call(function: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    arguments = function["arguments"]
    return function["name"], arguments if isinstance(arguments, Mapping) else {"arguments": arguments}
