"""Holds messages and events against the types of Anthropic's own client: no field is missing, and none is unknown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pydantic
from anthropic import types

_EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(types.RawMessageStreamEvent)


def check_message(value: object) -> types.Message:
    message = types.Message.model_validate(value)
    _check_known(message)
    return message


def check_event(value: dict[str, Any]) -> object:
    """Returns the event as the client has it."""
    event = _EVENT.validate_python(value)
    assert event.type == value["type"]
    _check_known(event)
    return event


def _check_known(value: object) -> None:
    if isinstance(value, pydantic.BaseModel):
        assert not value.model_extra, f"{type(value).__name__} has no {sorted(value.model_extra or ())}"
        for name in type(value).model_fields:
            _check_known(getattr(value, name))
    elif isinstance(value, list):
        for item in value:
            _check_known(item)


def raw_events(text: str) -> Iterator[dict[str, Any]]:
    """The data of all events of a stream, after a check of their framing."""
    assert text.endswith("\n\n")
    for frame in text.removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        yield value


def checked_events(text: str) -> list[dict[str, Any]]:
    """All events, held against the types and the order that Anthropic describes. A stream that failed ends early."""
    events = list(raw_events(text))
    opened = -1
    is_open = False
    for event in events:
        if event["type"] == "ping":
            assert event == {"type": "ping"}
            continue
        if event["type"] == "error":
            types.ErrorResponse.model_validate(event)
            assert event is events[-1]
            continue
        check_event(event)
        match event["type"]:
            case "content_block_start":
                assert not is_open and event["index"] == opened + 1
                opened, is_open = opened + 1, True
            case "content_block_delta":
                assert is_open and event["index"] == opened
            case "content_block_stop":
                assert is_open and event["index"] == opened
                is_open = False
    names = [event["type"] for event in events if event["type"] != "ping"]
    assert names[0] == "message_start" and names.count("message_start") == 1
    if names[-1] != "error":
        assert names[-2:] == ["message_delta", "message_stop"] and not is_open
        assert names.count("message_delta") == names.count("message_stop") == 1
    return events
