"""Parses the messages of a conversation into the one form that chat templates take."""

from __future__ import annotations

import json

from millstream.api.openai.parts import Content, parse_parts
from millstream.errors import BadRequest, UnknownParameter, UnsupportedParameter

Message = dict[str, object]

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Maps each role to its name in chat templates. `developer` is OpenAI's newer name for `system`."""

_TEXT_FIELDS = ("name", "tool_call_id", "reasoning_content")
_IGNORED_FIELDS = frozenset({"role", "content", "annotations"})
_UNSUPPORTED_FIELDS = frozenset({"function_call", "audio", "refusal"})


def parse_messages(value: object) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise BadRequest("messages must be a list of at least one message.", param="messages")
    return tuple(_message(item, f"messages[{index}]") for index, item in enumerate(value))


def _message(item: object, path: str) -> Message:
    if not isinstance(item, dict):
        raise BadRequest(f"{path} must be an object with a role and content.", param=path)
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise BadRequest(f"{path}.role must be one of {', '.join(ROLES)}.", param=f"{path}.role")
    message: Message = {"role": ROLES[role], "content": None}
    for name, field in item.items():
        # Clients send assistant messages back as they got them, with all their empty fields.
        empty = field is None or (field == [] and name not in _TEXT_FIELDS)
        if not empty and name not in _IGNORED_FIELDS:
            message[name] = _extra(name, field, path)
    message["content"] = _content(item.get("content"), role, path, has_calls="tool_calls" in message)
    return message


def _extra(name: str, field: object, path: str) -> object:
    param = f"{path}.{name}"
    if name in _TEXT_FIELDS:
        if not isinstance(field, str):
            raise BadRequest(f"{param} must be a string.", param=param)
    elif name == "tool_calls":
        return _tool_calls(field, param)
    elif name in _UNSUPPORTED_FIELDS:
        raise UnsupportedParameter(f"{param} is not supported by this server.", param=param)
    else:
        raise UnknownParameter(f"{param} is not a field of a message.", param=param)
    return field


def _tool_calls(field: object, path: str) -> list[dict[str, object]]:
    """Arguments are JSON in a string, as the server sends them, or an object if the client has parsed them."""
    if not isinstance(field, list) or not all(isinstance(call, dict) for call in field):
        raise BadRequest(f"{path} must be a list of objects.", param=path)
    return [_call(call, f"{path}[{index}]") for index, call in enumerate(field)]


def _call(call: dict[str, object], path: str) -> dict[str, object]:
    function = call.get("function")
    if call.get("type", "function") != "function" or not isinstance(function, dict):
        raise BadRequest(f"{path} must have the type function and a function object.", param=path)
    if not isinstance(call.get("id"), str | None):
        raise BadRequest(f"{path}.id must be a string.", param=f"{path}.id")
    if not isinstance(function.get("name"), str):
        raise BadRequest(f"{path}.function.name must be a string.", param=f"{path}.function.name")
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if not isinstance(arguments, str):
        param = f"{path}.function.arguments"
        raise BadRequest(f"{param} must be a string with a JSON object.", param=param)
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _content(content: object, role: str, path: str, *, has_calls: bool) -> Content | None:
    param = f"{path}.content"
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content:
        return parse_parts(content, param)
    if content is None and role == "assistant":
        return None if has_calls else ""  # most templates would print None
    raise BadRequest(f"{param} must be a string or a list of parts.", param=param)
