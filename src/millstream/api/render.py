"""Rendering deltas as bytes: the protocol that each endpoint of a dialect implements, and helpers for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from millstream.api.stream import StreamFormat
from millstream.errors import MillstreamError
from millstream.types import CallDelta, Delta, FinishReason, PromptToken, TextLogprob, Usage


class Renderer(Protocol):
    """Renders one generation, either as a stream or as a whole. The bytes of a stream are framed already."""

    @property
    def stream_format(self) -> StreamFormat: ...

    def opening(self, usage: Usage) -> bytes:
        """What a stream begins with, before any delta. `usage` has the tokens of the prompts."""
        ...

    def chunks(self, batch: Sequence[Delta]) -> bytes:
        """The chunks of one batch. Empty if there is nothing to show yet."""
        ...

    def ending(self, usage: Usage) -> bytes:
        """The end of a stream that went well."""
        ...

    def failure(self, error: MillstreamError) -> bytes:
        """The end of a stream that failed after its headers were sent."""
        ...

    def whole(self, deltas: Sequence[Delta], usage: Usage) -> bytes:
        """The JSON response, from all deltas in the order of their arrival. `per_choice` merges them."""
        ...


RendererFactory = Callable[[str], Renderer]
"""Makes the renderer once the name of the model is known."""


@dataclass(slots=True)
class _Pieces:
    texts: list[str] = field(default_factory=list)
    logprobs: list[TextLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    prompt: tuple[PromptToken, ...] = ()
    reasoning: list[str] = field(default_factory=list)
    calls: list[CallDelta] = field(default_factory=list)
    stop_string: str | None = None


def joined_calls(pieces: Sequence[CallDelta]) -> tuple[CallDelta, ...]:
    """Joins the pieces of tool calls, one result per call."""
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
    """Collects deltas and merges those of each choice into one."""

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
            pieces.stop_string = delta.stop_string or pieces.stop_string

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
                pieces.stop_string,
            )
            for index, pieces in sorted(self._choices.items())
        ]


def per_choice(deltas: Iterable[Delta]) -> list[Delta]:
    """Returns one delta per choice, in the order of their indices."""
    merger = Merger()
    merger.add(deltas)
    return merger.deltas()


def merged(batch: Sequence[Delta]) -> Sequence[Delta]:
    """Merges deltas of a choice, so that tokens that arrive together are one chunk on the wire.

    A choice has more than one delta in the result only if one delta cannot hold its parts in their order.
    """
    if len(batch) < 2 or len({delta.index for delta in batch}) == len(batch):
        return batch
    if not any(delta.calls or delta.reasoning for delta in batch):
        return per_choice(batch)
    runs: dict[int, list[Merger]] = {}
    ranks: dict[int, int] = {}
    for delta in batch:
        first, last = _ranks(delta)
        if first < ranks.get(delta.index, 3):
            runs.setdefault(delta.index, []).append(Merger())
            ranks[delta.index] = last
        runs[delta.index][-1].add((delta,))
        ranks[delta.index] = max(ranks[delta.index], last)
    return [delta for _, found in sorted(runs.items()) for run in found for delta in run.deltas()]


def _ranks(delta: Delta) -> tuple[int, int]:
    """The places of a delta's first and last part in the order of a delta: reasoning, text, calls."""
    places = [place for place, part in enumerate((delta.reasoning, delta.text, delta.calls)) if part]
    return (places[0], places[-1]) if places else (2, 0)
