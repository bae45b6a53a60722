"""The content blocks of a message, from the deltas of a generation, in the order in which the model writes them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic_core import from_json

from millstream.api.errors import printable
from millstream.exact_json import loads
from millstream.types import Delta, FinishReason, Usage

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """How a client wants its answer."""

    shows_thinking: bool = True
    """False if the client wants the signature of the reasoning only."""
    marks_cache: bool = False
    """True if the client marks parts of the prompt for the cache."""
    eager_tools: frozenset[str] = frozenset()
    """Tools whose arguments are streamed as they are generated."""
    empty: bool = False
    """True if the prompt is to be cached, and nothing else."""


class BlockKind(StrEnum):
    THINKING = "thinking"
    TEXT = "text"
    TOOL_USE = "tool_use"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a block, or a whole one."""

    kind: BlockKind
    text: str
    """Reasoning, text, or a part of a call's arguments."""
    call: int = 0
    """The number of the call."""
    id: str = ""
    name: str = ""

    def continues(self, other: Piece) -> bool:
        return self.kind is other.kind and self.call == other.call


def pieces(deltas: Sequence[Delta]) -> Iterator[Piece]:
    """The parts of the blocks, in order. Those of calls that turn out to be invalid within these deltas are left out:
    the text has them."""
    void = void_calls(deltas)
    for delta in deltas:
        if delta.reasoning:
            yield Piece(BlockKind.THINKING, delta.reasoning)
        if delta.text:
            yield Piece(BlockKind.TEXT, delta.text)
        for call in delta.calls:
            if call.index not in void:
                yield Piece(BlockKind.TOOL_USE, call.arguments, call.index, call.id, call.name)


def void_calls(deltas: Iterable[Delta]) -> set[int]:
    return {call.index for delta in deltas for call in delta.calls if call.void}


def blocks(deltas: Sequence[Delta]) -> list[Piece]:
    """The whole blocks of a message."""
    groups: list[list[Piece]] = []
    for piece in pieces(deltas):
        if groups and piece.continues(groups[-1][0]):
            groups[-1].append(piece)
        else:
            groups.append([piece])
    return [joined_pieces(group) for group in groups]


def joined_pieces(group: Sequence[Piece]) -> Piece:
    first = group[0]
    return Piece(first.kind, "".join(piece.text for piece in group), first.call, first.id, first.name)


def call_input(arguments: str) -> dict[str, Any]:
    """The arguments of a call as an object. Of a call that `max_tokens` cut, as much as there is: clients that add up
    a stream find the same."""
    try:
        value = _parsed(arguments) if arguments.strip() else {}
    except ValueError as error:  # nested too deeply; a client could not parse it either
        log.warning("the arguments of a call are left out: %s", printable(str(error)))
        return {}
    return value if isinstance(value, dict) else {}


def _parsed(arguments: str) -> object:
    found = from_json(arguments, allow_partial=True)
    try:
        return loads(arguments)
    except ValueError:  # it was cut
        return found


_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.CANCELLED: "end_turn",
    FinishReason.TOOL_CALLS: "tool_use",
}


class Ending:
    """Finds out from the deltas why a message ended."""

    def __init__(self) -> None:
        self._last = Delta(0, finish_reason=FinishReason.LENGTH)
        """A message of no tokens has reached its limit."""

    def add(self, deltas: Sequence[Delta]) -> None:
        self._last = next((delta for delta in deltas if delta.finish_reason is not None), self._last)

    def fields(self) -> dict[str, object]:
        reason, stop = self._last.finish_reason, self._last.stop_string
        if reason is FinishReason.STOP and stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        assert reason is not None
        return {"stop_reason": _REASONS[reason], "stop_sequence": None}


def usage_fields(usage: Usage, options: AnswerOptions) -> dict[str, object]:
    """Anthropic counts each token of a prompt once: read from the cache, written to it, or neither.

    This server caches all of a prompt but its last token, whether it is marked or not. What was not read counts as
    written if the client marks something for the cache, since others do not expect it.
    """
    new = usage.prompt_tokens - usage.cached_tokens
    written = max(new - 1, 0) if options.marks_cache else 0
    return {
        "input_tokens": new - written,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": 0 if options.empty else usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": 0 if options.empty else usage.reasoning_tokens},
    }
