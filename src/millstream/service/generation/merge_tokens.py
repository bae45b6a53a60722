"""Merges the queued `Tokens` events of a request: parsing many tokens at once costs little more than parsing one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from millstream.engine.generation.messages import Tokens
from millstream.engine.messages import RequestEvent


def merge_tokens(events: Sequence[RequestEvent]) -> list[RequestEvent]:
    """Returns the events with each run of `Tokens` of a request merged into one."""
    if sum([type(event) is Tokens for event in events]) < 2:
        return list(events)
    merged: list[RequestEvent] = []
    runs: dict[int, list[Tokens]] = {}
    starts: list[tuple[int, list[Tokens]]] = []
    for event in events:
        if not isinstance(event, Tokens):
            runs.pop(event.request_id, None)
            merged.append(event)
        elif event.request_id in runs:
            runs[event.request_id].append(event)
        else:
            runs[event.request_id] = [event]
            starts.append((len(merged), runs[event.request_id]))
            merged.append(event)
    for position, run in starts:
        if len(run) > 1:
            tokens = chain.from_iterable(event.tokens for event in run)
            logprobs = chain.from_iterable(event.logprobs for event in run)
            proposed, accepted = sum(event.proposed for event in run), sum(event.accepted for event in run)
            merged[position] = Tokens(run[0].request_id, tuple(tokens), tuple(logprobs), proposed, accepted)
    return merged
