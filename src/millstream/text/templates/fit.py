"""Fits a conversation to what the model's chat template can render, so that nothing in it is refused or lost.

Every change is local: it depends on a message and those before it, never on those after it. So a new turn leaves the
rendering of earlier turns as it was, and their prefix is found in the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any

from millstream.text.templates.abilities import SystemRole, TemplateAbilities, TextWithCalls
from millstream.text.templates.contents import joined, wrapped
from millstream.text.templates.template import Message
from millstream.text.templates.tool_prompt import result_as_text

NOTE_START, NOTE_END = "[System message]\n", "\n[End of system message]"
"""Around a system message that becomes part of a user message."""
PLACEHOLDER = "…"
"""The user message before an assistant message that begins a conversation, for templates that need one."""


def merged_start(messages: Sequence[Message]) -> list[Message]:
    """Joins the system messages that begin a conversation to one."""
    leading = list(takewhile(lambda message: message["role"] == "system", messages))
    if len(leading) < 2:
        return list(messages)
    content: object = ""
    for message in leading:
        content = joined(content, message.get("content"))
    return [{**leading[0], "content": content}, *messages[len(leading) :]]


def fit(messages: Sequence[Message], abilities: TemplateAbilities) -> list[Message]:
    """Returns the conversation in a form that the template renders. `merged_start` comes first."""
    lead, rest = (list(messages[:1]), messages[1:]) if _is(messages, 0, "system") else ([], messages)
    rest = list(_with_results(rest, abilities))
    if abilities.system is not SystemRole.ANYWHERE:
        rest = _with_notes(rest)
    if not abilities.parallel_calls or abilities.text_with_calls is TextWithCalls.APART:
        rest = _with_single_calls(rest, abilities)
    if abilities.system is SystemRole.NONE and lead:
        lead, rest = [], _after_system(lead[0].get("content"), rest)
    if abilities.user_first and not _is(rest, 0, "user"):
        rest = [{"role": "user", "content": PLACEHOLDER}, *rest]
    if abilities.alternates:
        rest = _alternating(rest)
    if not abilities.user_after_result:
        rest = list(_with_answers(rest, abilities.blank_assistant))
    return [_without_blank(message, abilities.blank_assistant) for message in [*lead, *rest]]


def is_regular(messages: Sequence[Message]) -> bool:
    """True for a conversation that every template renders, but for a system message that begins it."""
    turns = messages[1:] if _is(messages, 0, "system") else messages
    roles = ("user", "assistant")
    return len(turns) % 2 == 1 and all(
        message["role"] == roles[index % 2] and message.get("content") and "tool_calls" not in message
        for index, message in enumerate(turns)
    )


def _is(messages: Sequence[Message], index: int, role: str) -> bool:
    return index < len(messages) and messages[index]["role"] == role


def _after_system(content: object, messages: Sequence[Message]) -> list[Message]:
    """Puts the system message before the first user message, for templates without a system role."""
    if _is(messages, 0, "user"):
        return [{**messages[0], "content": joined(content, messages[0].get("content"))}, *messages[1:]]
    return [{"role": "user", "content": content}, *messages] if content else list(messages)


def _with_results(messages: Sequence[Message], abilities: TemplateAbilities) -> Iterable[Message]:
    """Turns tool results that the template does not render into user messages."""
    follows_call = False
    for message in messages:
        if message["role"] != "tool":
            follows_call = bool(message.get("tool_calls"))
            yield message
        elif abilities.results and (follows_call or abilities.orphan_results):
            yield message
        else:
            yield result_as_text(message)


def _with_notes(messages: Sequence[Message]) -> list[Message]:
    """Turns system messages into text of the user message beside them, or into one of their own."""
    found: list[Message] = []
    after_note = False
    for message in messages:
        is_note = message["role"] == "system"
        if is_note:
            message = {"role": "user", "content": wrapped(NOTE_START, message.get("content"), NOTE_END)}
        if found and found[-1]["role"] == message["role"] == "user" and (is_note or after_note):
            found[-1] = _joined_messages(found[-1], message)
        else:
            found.append(message)
        after_note = is_note
    return found


def _with_single_calls(messages: Sequence[Message], abilities: TemplateAbilities) -> list[Message]:
    """Splits assistant messages: text before its calls, and each call before its own result."""
    found: list[Message] = []
    index = 0
    while index < len(messages):
        message = messages[index]
        index += 1
        calls: Any = message.get("tool_calls")
        if not calls:
            found.append(message)
            continue
        if abilities.text_with_calls is TextWithCalls.APART and message.get("content"):
            found.append({name: value for name, value in message.items() if name != "tool_calls"})
            message = {"role": "assistant", "content": None, "tool_calls": calls}
        if abilities.parallel_calls or len(calls) == 1:
            found.append(message)
            continue
        results = list(takewhile(lambda each: each["role"] == "tool", messages[index:]))
        index += len(results)
        found += _single_calls(message, calls, results)
    return found


def _single_calls(message: Message, calls: Sequence[dict[str, Any]], results: Sequence[Message]) -> Iterable[Message]:
    """Yields each result after its call, in the order of the results. Calls without one come last."""
    left = list(calls)
    for result in results:
        call = next((call for call in left if call.get("id") == result.get("tool_call_id")), None)
        if call is not None:
            left.remove(call)
            yield {**message, "tool_calls": [call]}
            message = {"role": "assistant", "content": None}
        yield result
    for call in left:
        yield {**message, "tool_calls": [call]}
        message = {"role": "assistant", "content": None}


def _alternating(messages: Sequence[Message]) -> list[Message]:
    """Joins messages of one role that follow each other."""
    found: list[Message] = []
    for message in messages:
        if found and found[-1]["role"] == message["role"] and message["role"] in ("user", "assistant"):
            found[-1] = _joined_messages(found[-1], message)
        else:
            found.append(message)
    return found


def _joined_messages(first: Message, second: Message) -> Message:
    both: dict[str, object] = {**first, **second, "content": joined(first.get("content"), second.get("content"))}
    for name, between in (("reasoning_content", "\n\n"), ("tool_calls", "")):
        one, other = first.get(name), second.get(name)
        if isinstance(one, str) and isinstance(other, str):
            both[name] = one + between + other
        elif isinstance(one, list) and isinstance(other, list):
            both[name] = [*one, *other]
    return both


def _with_answers(messages: Sequence[Message], blank: str) -> Iterable[Message]:
    """Puts an empty answer between calls or results and the user message after them."""
    before: Message = {"role": "user"}
    for message in messages:
        if message["role"] == "user" and (before["role"] == "tool" or before.get("tool_calls")):
            yield {"role": "assistant", "content": blank}
        yield message
        before = message


def _without_blank(message: Message, blank: str) -> Message:
    empty = message["role"] == "assistant" and not message.get("content") and not message.get("tool_calls")
    return {**message, "content": blank} if blank and empty else message
