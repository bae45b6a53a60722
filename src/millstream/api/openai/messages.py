"""Parses the messages of a conversation into the one form that chat templates take.

Clients send assistant messages back with everything that they got, added or keep for themselves (`id`, `parsed`,
`provider_specific_fields`, ...), so a field that is not known is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millstream.api.functions import arguments_text
from millstream.api.openai.custom_tools import input_arguments
from millstream.api.openai.parts import parse_content
from millstream.api.volatile import stable_messages
from millstream.errors import BadRequest

Message = dict[str, object]
Fields = Mapping[str, Any]

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
"""Maps each role to its name in chat templates. `developer` is OpenAI's newer name for `system`, and `function` its
older name for `tool`."""


def parse_messages(value: object) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise BadRequest("messages must be a list of at least one message.", param="messages")
    reader = _Reader()
    return tuple(reader.read(item, index) for index, item in enumerate(stable_messages(value)))


class _Reader:
    """Reads message by message. Calls without an id get one, and so do results in the older form, which name only the
    function: the ids depend on nothing but the messages before, so they are equal from turn to turn."""

    def __init__(self) -> None:
        self._last_ids: dict[str, str] = {}
        """By function name: the id of its last call."""

    def read(self, item: object, index: int) -> Message:
        path = f"messages[{index}]"
        if not isinstance(item, dict):
            raise BadRequest(f"{path} must be an object with a role and content.", param=path)
        role = item.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise BadRequest(f"{path}.role must be one of {', '.join(ROLES)}.", param=f"{path}.role")
        parsed = parse_content(item.get("content"), f"{path}.content")
        message: Message = {"role": ROLES[role], "content": parsed.content}
        if name := _text(item, "name", path):
            message["name"] = name
        if role == "assistant":
            self._read_assistant(item, message, parsed.reasoning, index)
        elif call_id := self._result_id(item, role, path):
            message["tool_call_id"] = call_id
        return message

    def _read_assistant(self, item: Fields, message: Message, reasoning: str, index: int) -> None:
        path = f"messages[{index}]"
        refusal = _text(item, "refusal", path)
        message["content"] = message["content"] or refusal
        if reasoning := _reasoning(item, path) or reasoning:
            message["reasoning_content"] = reasoning
        calls = _calls(item, path)
        if calls:
            message["content"] = message["content"] or None  # a call without text, as in all dialects
            message["tool_calls"] = [self._with_id(call, f"call_{index}_{number}") for number, call in enumerate(calls)]

    def _with_id(self, call: dict[str, Any], default: str) -> dict[str, object]:
        call_id = call["id"] or default
        self._last_ids[call["function"]["name"]] = call_id
        return {**call, "id": call_id}

    def _result_id(self, item: Fields, role: str, path: str) -> str:
        if ROLES[role] != "tool":
            return ""
        return _text(item, "tool_call_id", path) or self._last_ids.get(_text(item, "name", path), "")


def _text(item: Fields, name: str, path: str) -> str:
    """Returns a field that is a string or null; "" if it is null or missing."""
    value = item.get(name)
    if value is not None and not isinstance(value, str):
        raise BadRequest(f"{path}.{name} must be a string.", param=f"{path}.{name}")
    return value or ""


def _reasoning(item: Fields, path: str) -> str:
    """Returns the reasoning, under any of the names that servers give it."""
    if text := _text(item, "reasoning_content", path):
        return text
    other = item.get("reasoning")
    if isinstance(other, str) and other:
        return other
    details = item.get("reasoning_details")
    if not isinstance(details, list):
        return ""
    texts = [detail.get("text") or detail.get("summary") for detail in details if isinstance(detail, dict)]
    return "".join(text for text in texts if isinstance(text, str))


def _calls(item: Fields, path: str) -> list[dict[str, Any]]:
    """Returns the calls of `tool_calls`, or the one of the older `function_call`. Their ids may be empty."""
    field, path_of_calls = item.get("tool_calls"), f"{path}.tool_calls"
    if field is not None and not (isinstance(field, list) and all(isinstance(call, dict) for call in field)):
        raise BadRequest(f"{path_of_calls} must be a list of objects.", param=path_of_calls)
    if field:
        return [_call(call, f"{path_of_calls}[{number}]") for number, call in enumerate(field)]
    older, path = item.get("function_call"), f"{path}.function_call"
    if older is None:
        return []
    if not isinstance(older, dict):
        raise BadRequest(f"{path} must be an object with a name and arguments.", param=path)
    return [_function_call("", older, path)]


def _call(call: Fields, path: str) -> dict[str, Any]:
    call_id = _text(call, "id", path)
    kind = call.get("type")
    if kind is None:
        kind = "custom" if "custom" in call else "function"
    inner = call.get(kind) if kind in ("function", "custom") else None
    if not isinstance(inner, dict):
        raise BadRequest(f"{path} must have the type function and a function object.", param=path)
    if kind == "function":
        return _function_call(call_id, inner, f"{path}.function")
    # A tool of free text is a function of one string.
    arguments = input_arguments(_text(inner, "input", f"{path}.custom"))
    return _function_call(call_id, {"name": inner.get("name"), "arguments": arguments}, f"{path}.custom")


def _function_call(call_id: str, function: Fields, path: str) -> dict[str, Any]:
    name = function.get("name")
    if not isinstance(name, str):
        raise BadRequest(f"{path}.name must be a string.", param=f"{path}.name")
    arguments = arguments_text(function.get("arguments"), f"{path}.arguments")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
