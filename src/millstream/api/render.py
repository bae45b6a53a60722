"""What an endpoint adds to the common way of answering: how deltas look in its dialect."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from millstream.types import CallDelta, Delta, FinishReason, PromptToken, TextLogprob, Usage


class Renderer(Protocol):
    """Turns one generation into bytes, either as a stream of events or whole."""

    def chunks(self, batch: Sequence[Delta]) -> bytes:
        """The events of one batch; empty when there is nothing to show yet."""
        ...

    def ending(self, usage: Usage) -> bytes:
        """The last events of a stream that went well."""
        ...

    def whole(self, choices: Sequence[Delta], usage: Usage) -> bytes:
        """The JSON answer, from one delta a choice in the order of their indices."""
        ...


RendererFactory = Callable[[str], Renderer]
"""Makes the renderer once it is known which model answers."""


@dataclass(slots=True)
class _Pieces:
    texts: list[str] = field(default_factory=list)
    logprobs: list[TextLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    prompt: tuple[PromptToken, ...] = ()
    reasoning: list[str] = field(default_factory=list)
    calls: list[CallDelta] = field(default_factory=list)


def joined_calls(pieces: Sequence[CallDelta]) -> tuple[CallDelta, ...]:
    """One for each call that these pieces belong to."""
    calls: dict[int, CallDelta] = {}
    for piece in pieces:
        known = calls.get(piece.index, CallDelta(piece.index))
        calls[piece.index] = CallDelta(
            piece.index,
            known.id or piece.id,
            known.name or piece.name,
            known.arguments + piece.arguments,
            known.void or piece.void,
        )
    return tuple(calls.values())


class Merger:
    """Collects deltas and gives back one for each choice."""

    def __init__(self) -> None:
        self._choices: dict[int, _Pieces] = {}

    def add(self, batch: Iterable[Delta]) -> None:
        for delta in batch:
            pieces = self._choices.setdefault(delta.index, _Pieces())
            pieces.texts.append(delta.text)
            pieces.logprobs.extend(delta.logprobs)
            pieces.prompt = delta.prompt or pieces.prompt
            pieces.finish_reason = delta.finish_reason or pieces.finish_reason
            pieces.reasoning.append(delta.reasoning)
            pieces.calls.extend(delta.calls)

    def deltas(self) -> list[Delta]:
        return [
            Delta(
                index,
                "".join(pieces.texts),
                tuple(pieces.logprobs),
                pieces.finish_reason,
                pieces.prompt,
                "".join(pieces.reasoning),
                joined_calls(pieces.calls),
            )
            for index, pieces in sorted(self._choices.items())
        ]


def merged(batch: Sequence[Delta]) -> Sequence[Delta]:
    """At most one delta a choice: tokens that came in one step are one chunk on the wire."""
    if len(batch) < 2 or len({delta.index for delta in batch}) == len(batch):
        return batch
    merger = Merger()
    merger.add(batch)
    return merger.deltas()
