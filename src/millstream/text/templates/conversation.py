"""Converts a conversation to the input of a model's chat template: messages, tools, calls and reasoning effort."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from millstream.exact_json import dumps_text, loads
from millstream.text.chat_format import ChatFormat
from millstream.text.control_tokens import ControlTokens
from millstream.text.templates.abilities import ABLE, STRICT, Arguments, TemplateAbilities
from millstream.text.templates.contents import joined
from millstream.text.templates.fit import fit, is_regular, merged_start
from millstream.text.templates.template import END_OF_PROMPT, Message
from millstream.text.templates.tool_prompt import with_calls_as_text, with_tool_prompt
from millstream.text.tool_formats.format import ToolFormat
from millstream.text.tool_formats.registry import FALLBACK
from millstream.types import ChatPrompt, Thinking, ToolUse, quickly_made

EFFORT_BUDGETS = {"none": 0, "minimal": 256, "low": 1024, "medium": 4096}
"""Reasoning tokens per effort, for templates without a `reasoning_effort`. Higher efforts have no limit."""

_MISTRAL_ID = re.compile(r"[a-zA-Z0-9]{9}")


def tool_format_of(chat_format: ChatFormat) -> ToolFormat:
    """Returns the model's own tool-call format, or the fallback that the tool prompt describes."""
    return chat_format.tools if chat_format.tools is not None else FALLBACK


def has_native_tools(chat_format: ChatFormat) -> bool:
    """True if the model has a tool-call format and its template renders tools."""
    return chat_format.template_has_tools and chat_format.tools is not None


def reasoning_budget(chat_format: ChatFormat, thinking: Thinking) -> int | None:
    """Returns how many tokens the reasoning may take; None for no limit."""
    if chat_format.reasoning is None:
        return None
    if thinking.budget is not None:
        return thinking.budget
    if thinking.effort is None or (chat_format.mentions("reasoning_effort") and thinking.effort != "none"):
        return None
    return EFFORT_BUDGETS.get(thinking.effort)


@quickly_made
@dataclass(frozen=True, slots=True)
class TemplateInput:
    """The input of a chat template.

    The first of the variants of the messages that renders counts. The probed abilities of a template decide on the
    first one, so it is the same from turn to turn. Another is only for what no probe has shown.
    """

    variants: Sequence[Sequence[Message]]
    kwargs: Mapping[str, object]
    continues: bool = False
    """True if the prompt ends within the last message: see `END_OF_PROMPT`."""
    escaped: bool = False
    """True if names of control tokens may have been escaped: see `ControlTokens`."""


def template_input(
    chat_format: ChatFormat,
    prompt: ChatPrompt,
    tools: ToolUse | None,
    thinking: Thinking,
    control: ControlTokens | None,
    abilities: TemplateAbilities = ABLE,
) -> TemplateInput:
    """Returns the template input of a conversation. `control` escapes control tokens in the client's text."""
    messages: Sequence[Message] = [_without_media(message) for message in prompt.messages]
    offered: Sequence[dict[str, Any]] = tools.tools if tools is not None and tools.choice != "none" else ()
    client_kwargs: Mapping[str, object] = prompt.template_kwargs
    escaped = False
    if control is not None:
        escaped, (messages, offered, client_kwargs) = control.escape(messages, offered, client_kwargs)
    kwargs = {**reasoning_kwargs(chat_format, thinking), **client_kwargs}
    messages = merged_start(messages)
    if offered and abilities.tools and has_native_tools(chat_format):
        kwargs["tools"] = list(offered)
    else:
        messages = with_tool_prompt(messages, tool_format_of(chat_format).syntax, offered)
    variants = _variants(chat_format, messages, abilities)
    continues = prompt.continue_final and messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
    if continues:
        variants = [[*variant[:-1], _marked_end(variant[-1])] for variant in variants]
        kwargs["add_generation_prompt"] = False
    return TemplateInput(variants, kwargs, continues, escaped)


def _marked_end(message: Message) -> Message:
    return {**message, "content": joined(message.get("content"), END_OF_PROMPT, "")}


def _without_media(message: Message) -> Message:
    """Removes the media themselves: a template needs only their types."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [{key: part[key] for key in ("type", "text") if key in part} for part in content]}


def reasoning_kwargs(chat_format: ChatFormat, thinking: Thinking) -> dict[str, object]:
    """Returns the template variables that control reasoning.

    Variables that the template does not mention are left out. Then only the token budget applies.
    """
    kwargs: dict[str, object] = {}
    if thinking.effort is not None:
        name = "enable_thinking" if chat_format.mentions("enable_thinking") else "thinking"
        if chat_format.mentions(name):
            kwargs[name] = thinking.effort != "none"
        if chat_format.mentions("reasoning_effort"):
            kwargs["reasoning_effort"] = "low" if thinking.effort in ("none", "minimal") else thinking.effort
    if thinking.budget is not None and chat_format.mentions("thinking_budget"):
        kwargs["thinking_budget"] = thinking.budget
    return kwargs


def _variants(
    chat_format: ChatFormat, messages: Sequence[Message], abilities: TemplateAbilities
) -> list[Sequence[Message]]:
    """Returns the messages as the template takes them, and for an unusual conversation also in a form that needs no
    more than user and assistant messages in turn."""
    if is_regular(messages) and not any("tool_call_id" in message for message in messages):
        return [fit(messages, abilities)]  # without calls and results, so what follows would change nothing
    parsed = _named_results([_with_argument_objects(message, chat_format) for message in messages])
    syntax = tool_format_of(chat_format).syntax
    as_text = [with_calls_as_text(message, syntax) for message in parsed]
    if not has_native_tools(chat_format):
        abilities = replace(abilities, calls=False, results=False)
    given = [_with_arguments(message, abilities.arguments) for message in parsed] if abilities.calls else as_text
    fitted = fit(given, abilities)
    return [fitted] if is_regular(messages) else [fitted, fit(as_text, STRICT)]


def _with_argument_objects(message: Message, chat_format: ChatFormat) -> Message:
    """Parses the arguments of calls, and converts ids to the form that the template expects."""
    changed: dict[str, Any] = dict(message)
    tool_format = chat_format.tools
    if isinstance(calls := message.get("tool_calls"), list):
        changed["tool_calls"] = [
            {
                **call,
                "id": _call_id(call.get("id"), tool_format),
                "function": {**call["function"], "arguments": _arguments_object(call)},
            }
            for call in calls
        ]
        reasoning = message.get("reasoning_content")
        if reasoning and not message.get("content") and tool_format is not None and tool_format.name == "harmony":
            changed["thinking"] = reasoning
    if "tool_call_id" in message:
        changed["tool_call_id"] = _call_id(message["tool_call_id"], tool_format)
    return changed


def _arguments_object(call: dict[str, Any]) -> object:
    arguments = call["function"]["arguments"]
    try:
        value = loads(arguments)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def _with_arguments(message: Message, form: Arguments) -> Message:
    """Returns the message with the arguments of its calls in the form that the template takes."""
    if form is Arguments.EITHER or not isinstance(calls := message.get("tool_calls"), list):
        return message
    return {
        **message,
        "tool_calls": [{**call, "function": _with_argument_form(call["function"], form)} for call in calls],
    }


def _with_argument_form(function: dict[str, Any], form: Arguments) -> dict[str, Any]:
    arguments = function["arguments"]
    if form is Arguments.STRING and not isinstance(arguments, str):
        return {**function, "arguments": dumps_text(arguments)}
    if form is Arguments.OBJECT and not isinstance(arguments, dict):
        return {**function, "arguments": {"arguments": arguments}}
    return function


def _named_results(messages: Sequence[Message]) -> list[Message]:
    """Adds the function's name to tool results: clients send only the call's id, but some templates need the name."""
    names: dict[object, str] = {}
    found: list[Message] = []
    for message in messages:
        for call in message.get("tool_calls") or ():  # type: ignore[attr-defined]
            names[call["id"]] = call["function"]["name"]
        known = names.get(message.get("tool_call_id"))
        found.append({"name": known, **message} if message["role"] == "tool" and known else message)
    return found


def _call_id(call_id: object, tool_format: ToolFormat | None) -> object:
    """Returns the id in the form that the template accepts: Mistral's refuse ids that are not 9 letters and digits."""
    if tool_format is None or tool_format.id_format != "mistral" or not isinstance(call_id, str):
        return call_id
    if _MISTRAL_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]
