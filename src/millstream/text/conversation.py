"""A conversation as a model's template wants it: tools, calls, results, and how much to think."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millstream.text.control_tokens import ControlTokens
from millstream.text.style import Style
from millstream.text.template import Message
from millstream.text.tool_formats.format import ToolFormat
from millstream.text.tool_formats.registry import FALLBACK
from millstream.text.tool_prompt import merged_system, told, with_written_calls
from millstream.types import ChatPrompt, Thinking, ToolUse

BUDGETS = {"none": 0, "minimal": 256, "low": 1024, "medium": 4096}
"""Tokens of thought for an effort, where the template does not take the word itself. Higher efforts have no bound."""

_MISTRAL_ID = re.compile(r"[a-zA-Z0-9]{9}")


def calling_format(style: Style) -> ToolFormat:
    """The format of a model's calls, its own or the one that it is told."""
    return style.tools if style.tools is not None else FALLBACK


def knows_tools(style: Style) -> bool:
    """Whether the model's own template and format serve tools."""
    return style.shows_tools and style.tools is not None


def budget_of(style: Style, thinking: Thinking) -> int | None:
    """Tokens that a model may think; None for no bound."""
    if style.reasoning is None:
        return None
    if thinking.budget is not None:
        return thinking.budget
    if thinking.effort is None or (style.takes("reasoning_effort") and thinking.effort != "none"):
        return None
    return BUDGETS.get(thinking.effort)


@dataclass(frozen=True, slots=True)
class Rendering:
    """What a chat template is given. Templates differ in what they take: the first variant that it renders counts."""

    variants: Sequence[Sequence[Message]]
    kwargs: Mapping[str, object]
    guarded: bool = False
    """Whether names of control tokens may have been broken: see `ControlTokens`."""


def rendering(
    style: Style, prompt: ChatPrompt, tools: ToolUse | None, thinking: Thinking, control: ControlTokens | None
) -> Rendering:
    """A conversation as its template takes it. `control`: what must not be taken for control in a client's text."""
    messages: Sequence[Message] = [_without_media(message) for message in prompt.messages]
    wanted: Sequence[dict[str, Any]] = tools.tools if tools is not None and tools.choice != "none" else ()
    given: Mapping[str, object] = prompt.template_kwargs
    guarded = False
    if control is not None:
        guarded, (messages, wanted, given) = control.guard(messages, wanted, given)
    kwargs = {**thinking_words(style, thinking), **given}
    if wanted and knows_tools(style):
        kwargs["tools"] = list(wanted)
    return Rendering(_variants(style, messages, wanted), kwargs, guarded)


def _without_media(message: Message) -> Message:
    """What media are is none of a template's business."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [{key: part[key] for key in ("type", "text") if key in part} for part in content]}


def thinking_words(style: Style, thinking: Thinking) -> dict[str, object]:
    """What templates call it. A word that the template does not know is left out: the budget does the work."""
    words: dict[str, object] = {}
    if thinking.effort is not None:
        name = "enable_thinking" if style.takes("enable_thinking") else "thinking"
        if style.takes(name):
            words[name] = thinking.effort != "none"
        if style.takes("reasoning_effort"):
            words["reasoning_effort"] = "low" if thinking.effort in ("none", "minimal") else thinking.effort
    if thinking.budget is not None and style.takes("thinking_budget"):
        words["thinking_budget"] = thinking.budget
    return words


def _variants(style: Style, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Sequence[Message]]:
    with_calls = any("tool_calls" in message or message["role"] == "tool" for message in messages)
    if not tools and not with_calls:
        return [messages]
    read = _named_results([_read(message, style) for message in messages])
    written = calling_format(style).written
    if knows_tools(style) and not style.takes("tool_calls"):
        return [[with_written_calls(message, written) for message in read]]
    if knows_tools(style):
        # Most templates want arguments as an object. Some join them to a string.
        return [read, [_unread(message) for message in read]]
    plain = told(read, written, tools)
    merged = merged_system(plain)
    return [plain] if merged is None else [plain, merged]


def _read(message: Message, style: Style) -> Message:
    """Arguments as objects, ids as the template wants them."""
    changed: dict[str, Any] = dict(message)
    form = style.tools
    if isinstance(calls := message.get("tool_calls"), list):
        changed["tool_calls"] = [
            {**call, "id": _id(call.get("id"), form), "function": {**call["function"], "arguments": _object(call)}}
            for call in calls
        ]
        thoughts = message.get("reasoning_content")
        if thoughts and not message.get("content") and form is not None and form.name == "harmony":
            changed["thinking"] = thoughts
    if "tool_call_id" in message:
        changed["tool_call_id"] = _id(message["tool_call_id"], form)
    return changed


def _object(call: dict[str, Any]) -> object:
    arguments = call["function"]["arguments"]
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _unread(message: Message) -> Message:
    if not isinstance(calls := message.get("tool_calls"), list):
        return message
    return {**message, "tool_calls": [{**call, "function": _with_string(call["function"])} for call in calls]}


def _with_string(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**function, "arguments": text}


def _named_results(messages: Sequence[Message]) -> list[Message]:
    """Results say which call they belong to by its id; some templates ask for the function's name."""
    names: dict[object, str] = {}
    found: list[Message] = []
    for message in messages:
        for call in message.get("tool_calls") or ():  # type: ignore[attr-defined]
            names[call["id"]] = call["function"]["name"]
        known = names.get(message.get("tool_call_id"))
        found.append({"name": known, **message} if message["role"] == "tool" and known else message)
    return found


def _id(given: object, form: ToolFormat | None) -> object:
    """Mistral's templates refuse ids of any other length: one from another server becomes one of theirs."""
    if form is None or form.ids != "mistral" or not isinstance(given, str) or _MISTRAL_ID.fullmatch(given):
        return given
    return hashlib.sha256(given.encode()).hexdigest()[:9]
