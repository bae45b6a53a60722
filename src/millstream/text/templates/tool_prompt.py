"""Tool use for models whose chat template has no tools: a system message lists them, calls and results are text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from millstream.exact_json import dumps_text
from millstream.text.templates.contents import joined, wrapped
from millstream.text.templates.template import Message
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
        return dumps_text(arguments)
    items = []
    for key, value in arguments.items():
        plain = isinstance(value, str) and keyed.quote != '"'
        text = f"{keyed.quote}{value}{keyed.quote}" if plain else dumps_text(value)
        items.append(keyed.before.replace("{key}", key) + text + keyed.after)
    return keyed.between.join(items)


def instructions(syntax: CallSyntax, tools: Sequence[Mapping[str, Any]]) -> str:
    """Returns the text that tells a model about its tools and how to call them."""
    listed = "\n".join(dumps_text(tool["function"]) for tool in tools)
    example = write_calls(syntax, [("name-of-function", {"name-of-parameter": "value"})])
    return _RULES.replace("{tools}", listed).replace("{example}", example)


def with_tool_prompt(
    messages: Sequence[Message], syntax: CallSyntax, tools: Sequence[Mapping[str, Any]]
) -> list[Message]:
    """Adds the tools to the system message that begins the conversation."""
    if not tools:
        return list(messages)
    text = instructions(syntax, tools)
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": joined(messages[0].get("content"), text)}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def with_calls_as_text(message: Message, syntax: CallSyntax) -> Message:
    """Moves an assistant message's calls into its content, for templates that do not render calls."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    text = write_calls(syntax, [_call(call["function"]) for call in calls])
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**others, "content": joined(message.get("content"), text, "\n")}


def result_as_text(message: Message) -> Message:
    """Turns a tool result into a user message, for templates that do not render results."""
    return {"role": "user", "content": wrapped("<tool_response>\n", message.get("content"), "\n</tool_response>")}


def _call(function: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    arguments = function["arguments"]
    return function["name"], arguments if isinstance(arguments, Mapping) else {"arguments": arguments}
