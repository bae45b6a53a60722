"""Tool use for models whose chat template has no tools: a system message lists them, calls and results are text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from millstream.text.template import Message
from millstream.text.tool_formats.format import CallSyntax

_RULES = """You can call functions. Their names and parameters, as JSON schemas:

{tools}

To call a function, write nothing but this, with the function's name and its arguments:

{example}

What it returns is then told to you between <tool_response> and </tool_response>. Call only functions of this list, \
and only where they help; otherwise answer in your own words."""


def write_calls(syntax: CallSyntax, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Writes calls as the model itself would."""
    each = [
        syntax.before.replace("{name}", name) + _arguments(syntax, arguments) + syntax.after
        for name, arguments in calls
    ]
    return syntax.opening + syntax.between.join(each) + syntax.closing


def _arguments(syntax: CallSyntax, arguments: Mapping[str, Any]) -> str:
    keyed = syntax.arguments
    if keyed is None:
        return json.dumps(arguments, ensure_ascii=False)
    items = []
    for key, value in arguments.items():
        plain = isinstance(value, str) and keyed.quote != '"'
        text = f"{keyed.quote}{value}{keyed.quote}" if plain else json.dumps(value, ensure_ascii=False)
        items.append(keyed.before.replace("{key}", key) + text + keyed.after)
    return keyed.between.join(items)


def instructions(syntax: CallSyntax, tools: Sequence[Mapping[str, Any]]) -> str:
    """Returns the text that tells a model about its tools and how to call them."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = write_calls(syntax, [("name-of-function", {"name-of-parameter": "value"})])
    return _RULES.replace("{tools}", listed).replace("{example}", example)


def with_tool_prompt(
    messages: Sequence[Message], syntax: CallSyntax, tools: Sequence[Mapping[str, Any]]
) -> list[Message]:
    """Adds the tools to the system message, and replaces roles and fields that only tools have by text."""
    extra = [instructions(syntax, tools)] if tools else []
    plain = [_plain(message, syntax) for message in messages]
    if plain and plain[0]["role"] == "system":
        first = {**plain[0], "content": "\n\n".join([str(plain[0]["content"] or ""), *extra])}
        return [first, *plain[1:]]
    return [{"role": "system", "content": text} for text in extra] + plain


def merged_system(messages: Sequence[Message]) -> list[Message] | None:
    """Moves the system message to the start of the first user message, for templates that have no system role.

    Returns None if the conversation does not begin with these two messages.
    """
    if len(messages) < 2 or messages[0]["role"] != "system" or messages[1]["role"] != "user":
        return None
    system, user = messages[0], messages[1]
    return [{**user, "content": f"{system['content']}\n\n{user['content']}"}, *messages[2:]]


def with_calls_as_text(message: Message, syntax: CallSyntax) -> Message:
    """Moves an assistant message's calls into its content, for templates that do not render calls."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    text = write_calls(syntax, [_call(call["function"]) for call in calls])
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**others, "content": "\n".join(part for part in (message.get("content"), text) if isinstance(part, str))}


def _plain(message: Message, syntax: CallSyntax) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"}
    return with_calls_as_text(message, syntax)


def _call(function: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    arguments = function["arguments"]
    return function["name"], arguments if isinstance(arguments, Mapping) else {"arguments": arguments}
