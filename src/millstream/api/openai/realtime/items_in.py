"""Parses items of a conversation that a client adds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast

from millstream.api.openai.realtime.fields import Fields
from millstream.errors import BadRequest, UnsupportedParameter
from millstream.realtime_types import Item, Part
from millstream.types import MediaPart

KINDS = ("message", "function_call", "function_call_output")
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def parse_item(value: object, path: str = "item", known: Callable[[str], Item] | None = None) -> Item:
    """`known` finds an item that is referred to by its id, where that is allowed."""
    fields = Fields.of(value, path)
    if known is not None and fields.raw("type") == "item_reference":
        return known(fields.needed("id"))
    kind = fields.one_of("type", KINDS) or "message"
    item_id = fields.text("id") or ""
    if len(item_id) > 64:
        raise BadRequest(f"{path}.id has more than 64 characters.", param=f"{path}.id")
    if kind == "function_call_output":
        return Item(
            item_id, "function_call_output", call_id=fields.needed("call_id"), output=fields.text("output") or ""
        )
    if kind == "function_call":
        return Item(
            item_id,
            "function_call",
            call_id=fields.text("call_id") or item_id,
            name=fields.needed("name"),
            arguments=fields.text("arguments") or "{}",
        )
    role = fields.one_of("role", tuple(ROLES))
    if role is None:
        raise BadRequest(f"{path}.role is required.", param=f"{path}.role")
    content = fields.list("content") or []
    parts = tuple(_part(part, f"{path}.content[{index}]", role) for index, part in enumerate(content))
    return Item(item_id, role=cast(Any, ROLES[role]), parts=parts)


def _part(value: object, path: str, role: str) -> Part:
    fields = Fields.of(value, path)
    kind = fields.text("type")
    own: Literal["output_text", "input_text"] = "output_text" if role == "assistant" else "input_text"
    match kind:
        case "input_text" | "output_text" | "text":
            return Part(own, fields.text("text") or "")
        case "output_audio":
            return Part("output_audio", fields.text("transcript") or "")
        case "input_audio" | "audio":
            transcript = fields.text("transcript")
            if role == "assistant":
                return Part("output_audio", transcript or "")
            return Part("input_audio", transcript, b"" if transcript is not None else fields.audio("audio"))
        case "input_image":
            return Part("input_image", media=MediaPart("image", fields.needed("image_url"), f"{path}.image_url"))
    raise UnsupportedParameter(
        f"{path}.type must be input_text, input_audio, input_image, output_text or output_audio.", param=f"{path}.type"
    )
