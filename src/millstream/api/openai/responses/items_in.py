"""Parses input items into entries of a conversation. `conversation.py` makes messages of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from millstream.api.functions import arguments_text
from millstream.api.openai.custom_tools import input_arguments
from millstream.api.openai.parts import Content
from millstream.api.openai.responses.content import parse_content, parse_text
from millstream.api.openai.responses.ids import turn_of
from millstream.api.openai.responses.names import joined_name
from millstream.errors import BadRequest
from millstream.exact_json import dumps_text
from millstream.service.ports import Seal

Item = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Reasoned:
    text: str
    turn: str | None = None
    """Equal for items of one generation; None if unknown."""


@dataclass(frozen=True, slots=True)
class Said:
    role: str
    content: Content
    turn: str | None = None


@dataclass(frozen=True, slots=True)
class Called:
    call_id: str
    name: str
    arguments: str
    turn: str | None = None


@dataclass(frozen=True, slots=True)
class Returned:
    call_id: str
    content: Content
    turn: str | None = None


@dataclass(frozen=True, slots=True)
class Reference:
    """An item of a stored response, to be looked up."""

    item_id: str
    path: str


Entry = Reasoned | Said | Called | Returned | Reference

ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
"""Maps each role to its name in chat templates."""
REFUSED = "The user did not approve this call."


def parse_items(items: Sequence[object], seal: Seal, path: str = "input") -> list[Entry]:
    """Raises `BadRequest` that names the item."""
    return [entry for index, item in enumerate(items) for entry in parse_item(item, seal, f"{path}[{index}]")]


def parse_item(item: object, seal: Seal, path: str) -> list[Entry]:
    if not isinstance(item, dict):
        raise BadRequest(f"{path} must be an object: a message or another item.", param=path)
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item else "item_reference" if "id" in item else None
    if kind == "reasoning":
        return _reasoning(item, seal, path)
    parse = _PARSERS.get(kind) if isinstance(kind, str) else None
    if parse is not None:
        return parse(item, path)
    if kind in _SKIPPED:
        return []
    known = ", ".join(("reasoning", *_PARSERS))
    raise BadRequest(f"{path}.type is {str(kind)[:40]!r}, but must be one of {known}.", param=f"{path}.type")


def _message(item: Item, path: str) -> list[Entry]:
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise BadRequest(f"{path}.role must be one of {', '.join(ROLES)}.", param=f"{path}.role")
    content = item.get("content")
    if content is None and role != "assistant":
        raise BadRequest(f"{path}.content must be a string or a list of parts.", param=f"{path}.content")
    if role == "assistant":
        return [Said(role, parse_text(content, f"{path}.content"), turn_of(item.get("id")))]
    return [Said(ROLES[role], parse_content(content, f"{path}.content"))]


def _reasoning(item: Item, seal: Seal, path: str) -> list[Entry]:
    """Sealed reasoning counts before text. A summary is not what the model wrote, so it is not shown to it."""
    sealed = item.get("encrypted_content")
    text = seal.open(sealed) if isinstance(sealed, str) else None
    if text is None:
        text = parse_text(item.get("content"), f"{path}.content")
    return [Reasoned(text, turn_of(item.get("id")))] if text else []


def _string(item: Item, name: str, path: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise BadRequest(f"{path}.{name} must be a string.", param=f"{path}.{name}")
    return value


def _namespaced(item: Item, path: str) -> str:
    namespace = item.get("namespace")
    if not isinstance(namespace, str | None):
        raise BadRequest(f"{path}.namespace must be a string.", param=f"{path}.namespace")
    return joined_name(namespace, _string(item, "name", path))


def _function_call(item: Item, path: str) -> list[Entry]:
    arguments = arguments_text(item.get("arguments"), f"{path}.arguments")
    return [Called(_string(item, "call_id", path), _namespaced(item, path), arguments, turn_of(item.get("id")))]


def _custom_call(item: Item, path: str) -> list[Entry]:
    arguments = input_arguments(_string(item, "input", path))
    return [Called(_string(item, "call_id", path), _namespaced(item, path), arguments, turn_of(item.get("id")))]


def _call_output(item: Item, path: str) -> list[Entry]:
    if "output" not in item:
        raise BadRequest(f"{path}.output is required.", param=f"{path}.output")
    output = item["output"]
    if isinstance(output, dict):
        output = dumps_text(output)
    return [Returned(_string(item, "call_id", path), parse_content(output, f"{path}.output"))]


def _mcp_call(item: Item, path: str) -> list[Entry]:
    """A call and its output in one item. An approved call was there before, as a request for approval."""
    output = item.get("output")
    text = output if isinstance(output, str) else _error_text(item.get("error"))
    asked, own = item.get("approval_request_id"), _string(item, "id", path)
    if isinstance(asked, str):
        return [Returned(asked, text)]
    name = joined_name(_string(item, "server_label", path), _string(item, "name", path))
    turn = turn_of(own)
    arguments = arguments_text(item.get("arguments"), f"{path}.arguments")
    return [Called(own, name, arguments, turn), Returned(own, text, turn)]


def _error_text(error: object) -> str:
    match error:
        case str():
            return error
        case {"message": str(message)}:
            return message
        case {"content": [{"text": str(text)}]}:
            return text
        case _:
            return dumps_text(error)


def _approval_request(item: Item, path: str) -> list[Entry]:
    name = joined_name(_string(item, "server_label", path), _string(item, "name", path))
    own = _string(item, "id", path)
    return [Called(own, name, arguments_text(item.get("arguments"), f"{path}.arguments"), turn_of(own))]


def _approval_response(item: Item, path: str) -> list[Entry]:
    request = _string(item, "approval_request_id", path)
    approve, reason = item.get("approve"), item.get("reason")
    if not isinstance(approve, bool):
        raise BadRequest(f"{path}.approve must be true or false.", param=f"{path}.approve")
    if approve:
        return []
    return [Returned(request, f"{REFUSED} {reason}" if isinstance(reason, str) and reason else REFUSED)]


def _hosted_call(item: Item, path: str) -> list[Entry]:
    """A call of a shell or an editor that the client runs. It is shown to the model as a call of a function."""
    name = str(item["type"]).removesuffix("_call")
    action = item.get("action", item.get("operation"))
    call_id = item.get("call_id") or item.get("id")
    if not isinstance(call_id, str):
        raise BadRequest(f"{path}.call_id must be a string.", param=f"{path}.call_id")
    return [Called(call_id, name, dumps_text(action), turn_of(item.get("id")))]


def _hosted_output(item: Item, path: str) -> list[Entry]:
    call_id = item.get("call_id") or item.get("id")
    if not isinstance(call_id, str):
        raise BadRequest(f"{path}.call_id must be a string.", param=f"{path}.call_id")
    output = item.get("output")
    return [Returned(call_id, output if isinstance(output, str) else dumps_text(output))]


def _reference(item: Item, path: str) -> list[Entry]:
    return [Reference(_string(item, "id", path), path)]


def _agent_message(item: Item, path: str) -> list[Entry]:
    return [Said("user", parse_content(item.get("content"), f"{path}.content"))]


_PARSERS: dict[str, Callable[[Item, str], list[Entry]]] = {
    "message": _message,
    "function_call": _function_call,
    "function_call_output": _call_output,
    "custom_tool_call": _custom_call,
    "custom_tool_call_output": _call_output,
    "item_reference": _reference,
    "mcp_call": _mcp_call,
    "mcp_approval_request": _approval_request,
    "mcp_approval_response": _approval_response,
    "local_shell_call": _hosted_call,
    "local_shell_call_output": _hosted_output,
    "shell_call": _hosted_call,
    "shell_call_output": _hosted_output,
    "apply_patch_call": _hosted_call,
    "apply_patch_call_output": _hosted_output,
    "agent_message": _agent_message,
}
_SKIPPED = frozenset(
    {
        "additional_tools",  # `tools.py` reads them
        "mcp_list_tools",
        "web_search_call",
        "file_search_call",
        "computer_call",
        "computer_call_output",
        "code_interpreter_call",
        "image_generation_call",
        "tool_search_call",
        "tool_search_output",
    }
)
"""Items of hosted tools in a history. This server has no such tools, and what they found is in the answer."""
