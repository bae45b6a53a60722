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

    def deltas(self, choice: int, calls: Sequence[CallDelta], *, ended: bool) -> list[Fields]:
        """The deltas of chunks, for pieces of calls of the choice with this number. `ended`: no more will follow."""
        ...


class ToolCalls:
    """Implements `CallRenderer`. `custom`: names of tools that take free text."""

    finish = "tool_calls"

    def __init__(self, custom: frozenset[str] = frozenset()) -> None:
        self._custom = custom
        self._decoders: dict[int, tuple[int, InputDecoder]] = {}
        """Of the call of a custom tool that each choice is writing, with the number of the call."""

    def message(self, calls: Sequence[CallDelta]) -> Fields:
        return {"tool_calls": [self._whole(call) for call in calls]}

    def _whole(self, call: CallDelta) -> Fields:
        if call.name in self._custom:
            decoder = InputDecoder()
            return _custom(call, decoder.push(call.arguments) + decoder.rest())
        return _function(call)

    def deltas(self, choice: int, calls: Sequence[CallDelta], *, ended: bool) -> list[Fields]:
        found: list[Fields] = []
        for call in calls:
            if call.id:
                found += self._rest(choice)
                if call.name in self._custom:
                    self._decoders[choice] = call.index, InputDecoder()
            if piece := self._piece(choice, call):
                found.append(_delta(call.index, piece))
            if call.void:
                self._decoders.pop(choice, None)
        return found + self._rest(choice) if ended else found

    def _piece(self, choice: int, call: CallDelta) -> Fields:
        if choice in self._decoders:
            text = self._decoders[choice][1].push(call.arguments)
            return _custom(call, text) if call.id else {"custom": {"input": text}} if text else {}
        if call.id:
            return _function(call)
        return {"function": {"arguments": call.arguments}} if call.arguments else {}

    def _rest(self, choice: int) -> list[Fields]:
        """What is left of a custom tool's call that is complete: its arguments may have another form."""
        index, decoder = self._decoders.pop(choice, (0, None))
        text = decoder.rest() if decoder is not None else ""
        return [_delta(index, {"custom": {"input": text}})] if text else []


class FunctionCalls:
    """Implements `CallRenderer` in the older form, which has room for one call."""

    finish = "function_call"

    def message(self, calls: Sequence[CallDelta]) -> Fields:
        return {"function_call": {"name": calls[0].name, "arguments": calls[0].arguments}}

    def deltas(self, choice: int, calls: Sequence[CallDelta], *, ended: bool) -> list[Fields]:
        pieces = [{"arguments": call.arguments} | ({"name": call.name} if call.id else {}) for call in calls]
        return [{"function_call": piece} for piece in pieces if "name" in piece or piece["arguments"]]


def _delta(index: int, piece: Fields) -> Fields:
    return {"tool_calls": [{"index": index} | piece]}


def _function(call: CallDelta) -> Fields:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _custom(call: CallDelta, text: str) -> Fields:
    return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": text}}
