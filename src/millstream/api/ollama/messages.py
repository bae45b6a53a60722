"""Parses the messages of a conversation into the one form that chat templates take.

Ollama's messages have no ids of calls, or have them only lately: a result follows its call, or names its function.
Templates need ids, so calls without one get an id, and results the id of their call.
"""

from __future__ import annotations

from typing import Any

from millstream.api.functions import arguments_text
from millstream.api.ollama.images import IMAGES, parse_images
from millstream.api.volatile import stable_messages
from millstream.errors import BadRequest

Message = dict[str, object]

ROLES = ("system", "user", "assistant", "tool")


class _OpenCalls:
    """The calls that no result has followed yet, as pairs of id and function name."""

    def __init__(self) -> None:
        self._calls: list[tuple[str, str]] = []
        self._count = 0

    def new_id(self) -> str:
        """The same in each turn of a conversation, so its prompt stays the same. Mistral's templates want 9 letters
        and digits."""
        self._count += 1
        return f"call{self._count:05d}"

    def opened(self, call_id: str, name: str) -> None:
        self._calls.append((call_id, name))

    def answered(self, call_id: str | None, name: str | None) -> str | None:
        """Returns the id of the call that a result belongs to: by id, else by function name, else the next one."""
        if call_id is not None:
            found = [call for call in self._calls if call[0] == call_id]
        else:
            found = [call for call in self._calls if call[1] == name] or self._calls
        if not found:
            return call_id
        call = found[0]
        self._calls.remove(call)
        return call[0]


def parse_messages(value: object) -> tuple[Message, ...]:
    if not isinstance(value, list):
        raise BadRequest("messages must be a list.", param="messages")
    calls = _OpenCalls()
    return tuple(_message(item, f"messages[{index}]", calls) for index, item in enumerate(stable_messages(value)))


def _message(item: object, path: str, calls: _OpenCalls) -> Message:
    if not isinstance(item, dict):
        raise BadRequest(f"{path} must be an object with a role and content.", param=path)
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise BadRequest(f"{path}.role must be one of {', '.join(ROLES)}.", param=f"{path}.role")
    text = _text(item, "content", path) or ""
    images = [] if item.get("images") is None else parse_images(item["images"], f"{path}.images")
    # Ollama puts images before the text of their message.
    content: object = [*images, *([{"type": "text", "text": text}] if text else [])] if images else text
    message: Message = {"role": role, "content": content}
    if thinking := _text(item, "thinking", path):
        message["reasoning_content"] = thinking
    if item.get("tool_calls") not in (None, []):
        message["tool_calls"] = _tool_calls(item["tool_calls"], f"{path}.tool_calls", calls)
        message["content"] = content or None  # as other dialects have it: a call without text
    call_id, name = _text(item, "tool_call_id", path), _text(item, "tool_name", path)
    if role == "tool":
        if (answered := calls.answered(call_id, name)) is not None:
            message["tool_call_id"] = answered
        if name:
            message["name"] = name
    return message


def _text(item: dict[str, object], name: str, path: str) -> str | None:
    value = item.get(name)
    if value is not None and not isinstance(value, str):
        raise BadRequest(f"{path}.{name} must be a string.", param=f"{path}.{name}")
    return value


def _tool_calls(value: object, path: str, calls: _OpenCalls) -> list[dict[str, object]]:
    if not isinstance(value, list):
        raise BadRequest(f"{path} must be a list.", param=path)
    return [_call(call, f"{path}[{index}]", calls) for index, call in enumerate(value)]


def _call(call: object, path: str, calls: _OpenCalls) -> dict[str, object]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise BadRequest(f"{path} must be an object with a function.", param=path)
    name = _text(function, "name", f"{path}.function")
    if not name:
        raise BadRequest(f"{path}.function.name is required.", param=f"{path}.function.name")
    arguments = arguments_text(function.get("arguments"), f"{path}.function.arguments")
    call_id = _text(call, "id", path) or calls.new_id()
    calls.opened(call_id, name)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


_TEXT: dict[str, Any] = {"type": ["string", "null"]}
_CALL: dict[str, Any] = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "id": _TEXT,
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "minLength": 1},
                "arguments": {"type": ["object", "string", "null"], "description": "An object, or its JSON."},
            },
        },
    },
}
MESSAGES: dict[str, Any] = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"enum": list(ROLES)},
            "content": _TEXT,
            "thinking": _TEXT | {"description": "The model's reasoning, sent back to it."},
            "images": {"anyOf": [IMAGES, {"type": "null"}]},
            "tool_calls": {"anyOf": [{"type": "array", "items": _CALL}, {"type": "null"}]},
            "tool_name": _TEXT | {"description": "With the role tool: the function that was called."},
            "tool_call_id": _TEXT | {"description": "With the role tool: the id of the call."},
        },
    },
}
