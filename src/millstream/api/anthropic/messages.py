"""Parses `system` and `messages` into the one form that chat templates take."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.api.anthropic.content import Block, Part, block_list, joined, parse_part, text_field, text_part
from millstream.api.functions import arguments_text
from millstream.api.volatile import without_volatile
from millstream.errors import BadRequest
from millstream.service.ports import Seal

Message = dict[str, object]

ROLES = ("user", "assistant", "system")
FAILED = "The call failed: "
"""Begins the result of a call that the client marks as failed."""

_ASSISTANT_ONLY = ("tool_use", "thinking", "redacted_thinking")


def parse_system(value: object) -> tuple[Message, ...]:
    """The system prompt as a message; none if it is empty."""
    text = _system_text(value, "system")
    return ({"role": "system", "content": text},) if text else ()


def parse_messages(value: object, seal: Seal) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise BadRequest("messages must be a list of at least one message.", param="messages")
    return tuple(message for index, item in enumerate(value) for message in _messages(item, f"messages[{index}]", seal))


def _messages(item: object, path: str, seal: Seal) -> Sequence[Message]:
    if not isinstance(item, dict):
        raise BadRequest(f"{path} must be an object with a role and content.", param=path)
    role = item.get("role")
    if role not in ROLES:
        raise BadRequest(f"{path}.role must be one of {', '.join(ROLES)}.", param=f"{path}.role")
    content, path = item.get("content"), f"{path}.content"
    if role == "system":
        text = _system_text(content, path)
        return [{"role": "system", "content": text}] if text else []
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = block_list(content, path)
    return [_assistant(blocks, seal)] if role == "assistant" else _user(blocks)


def _system_text(value: object, path: str) -> str:
    if isinstance(value, str):
        return without_volatile(value)
    texts = []
    for kind, block, place in block_list(value, path):
        if kind != "text":
            raise BadRequest(
                f"{place} has the type {kind[:64]!r}; a system prompt consists of text blocks.", param=f"{place}.type"
            )
        texts.append(without_volatile(text_field(block, "text", place)))
    return "\n\n".join(text for text in texts if text)


def _assistant(blocks: Sequence[tuple[str, Block, str]], seal: Seal) -> Message:
    parts: list[Part] = []
    calls: list[dict[str, object]] = []
    reasoning = ""
    for kind, block, path in blocks:
        if kind == "tool_use":
            calls.append(_call(block, path))
        elif kind == "thinking":
            reasoning += _thinking(block, path, seal)
        elif kind == "redacted_thinking":
            reasoning += seal.open(text_field(block, "data", path)) or ""
        elif kind == "tool_result":
            raise BadRequest(f"{path}: a tool_result belongs into a user message.", param=f"{path}.type")
        else:
            parts.append(parse_part(kind, block, path))
    message: Message = {"role": "assistant", "content": joined(parts) or (None if calls else "")}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _thinking(block: Block, path: str, seal: Seal) -> str:
    """The reasoning itself, or what its signature holds where the client got or kept no more than that."""
    signature = text_field(block, "signature", path, required=False)
    return text_field(block, "thinking", path, required=False) or seal.open(signature) or ""


def _call(block: Block, path: str) -> dict[str, object]:
    call_id, name = text_field(block, "id", path), text_field(block, "name", path)
    arguments = block.get("input", {})
    if not isinstance(arguments, dict):
        raise BadRequest(f"{path}.input must be an object.", param=f"{path}.input")
    function = {"name": name, "arguments": arguments_text(arguments, f"{path}.input")}
    return {"id": call_id, "type": "function", "function": function}


def _user(blocks: Sequence[tuple[str, Block, str]]) -> list[Message]:
    """The results of calls come first, each as a message of its own. Then the rest follows, as one message."""
    results: list[Message] = []
    rest: list[Part] = []
    images: list[Part] = []
    for kind, block, path in blocks:
        if kind == "tool_result":
            result, its_images = _result(block, path)
            results.append(result)
            images += its_images
        elif kind in _ASSISTANT_ONLY:
            raise BadRequest(f"{path}: a {kind} block belongs into an assistant message.", param=f"{path}.type")
        else:
            rest.append(parse_part(kind, block, path))
    parts = images + rest
    return [*results, {"role": "user", "content": joined(parts)}] if parts or not results else results


def _result(block: Block, path: str) -> tuple[Message, list[Part]]:
    """The result of a call as a message, and its images: the tool messages of most templates have room for text only,
    so images go into the user message that follows, which says what they belong to."""
    call_id = text_field(block, "tool_use_id", path)
    content = block.get("content")
    parts = [] if content is None else _result_parts(content, f"{path}.content")
    images = [part for part in parts if part["type"] != "text"]
    text = "\n".join(str(part["text"]) for part in parts if part["type"] == "text")
    if images and not text:
        text = "The result is an image. It follows."
    if block.get("is_error") is True:
        text = FAILED + text
    label = [text_part(f"Result of the call {call_id}:\n")] if images else []
    return {"role": "tool", "tool_call_id": call_id, "content": text}, label + images


def _result_parts(content: object, path: str) -> list[Part]:
    if isinstance(content, str):
        return [text_part(content)]
    return [parse_part(*block) for block in block_list(content, path)]
