"""Renders tool calls in a message or in a chunk: functions, custom tools, and the older `function_call`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from millstream.api.openai.custom_tools import InputDecoder
from millstream.types import CallDelta

Fields = dict[str, object]


class CallRenderer(Protocol):
    finish: str
    """The finish reason of a message with calls."""

    def message(self, calls: Sequence[CallDelta]) -> Fields:
        """The fields of a message with these calls."""
        ...

    def delta(self, choice: int, call: CallDelta) -> Fields | None:
        """The delta of a chunk, for a piece of a call of the choice with this number. None if it adds nothing."""
        ...


class ToolCalls:
    """Implements `CallRenderer`. `custom`: names of tools that take free text."""

    finish = "tool_calls"

    def __init__(self, custom: frozenset[str] = frozenset()) -> None:
        self._custom = custom
        self._decoders: dict[tuple[int, int], InputDecoder] = {}
        """Of calls of custom tools, by the numbers of their choice and of the call."""

    def message(self, calls: Sequence[CallDelta]) -> Fields:
        return {"tool_calls": [self._whole(call) for call in calls]}

    def _whole(self, call: CallDelta) -> Fields:
        if call.name in self._custom:
            decoder = InputDecoder()
            return _custom(call, decoder.push(call.arguments) + decoder.rest())
        return _function(call)

    def delta(self, choice: int, call: CallDelta) -> Fields | None:
        if call.id and call.name in self._custom:
            self._decoders[choice, call.index] = InputDecoder()
        decoder = self._decoders.get((choice, call.index))
        piece: Fields | None
        if decoder is not None:
            text = decoder.push(call.arguments)
            piece = _custom(call, text) if call.id else {"custom": {"input": text}} if text else None
        elif call.id:
            piece = _function(call)
        else:
            piece = {"function": {"arguments": call.arguments}} if call.arguments else None
        return None if piece is None else {"tool_calls": [{"index": call.index} | piece]}


class FunctionCalls:
    """Implements `CallRenderer` in the older form, which has room for one call."""

    finish = "function_call"

    def message(self, calls: Sequence[CallDelta]) -> Fields:
        return {"function_call": {"name": calls[0].name, "arguments": calls[0].arguments}}

    def delta(self, choice: int, call: CallDelta) -> Fields | None:
        if call.id:
            return {"function_call": {"name": call.name, "arguments": call.arguments}}
        return {"function_call": {"arguments": call.arguments}} if call.arguments else None


def _function(call: CallDelta) -> Fields:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _custom(call: CallDelta, text: str) -> Fields:
    return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": text}}
