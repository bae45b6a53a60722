"""Joins the tokens of a request that wait together: parsing many at once costs little more than one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from millstream.engine.generation.messages import Tokens
from millstream.engine.messages import RequestEvent


def merge_tokens(events: Sequence[RequestEvent]) -> list[RequestEvent]:
    """The same events, with one `Tokens` for each run of them that a request has."""
    found: list[RequestEvent] = []
    runs: dict[int, list[Tokens]] = {}
    joined: list[tuple[int, list[Tokens]]] = []
    for event in events:
        if not isinstance(event, Tokens):
            runs.pop(event.request_id, None)
            found.append(event)
        elif event.request_id in runs:
            runs[event.request_id].append(event)
        else:
            runs[event.request_id] = [event]
            joined.append((len(found), runs[event.request_id]))
            found.append(event)
    for position, run in joined:
        if len(run) > 1:
            tokens = chain.from_iterable(event.tokens for event in run)
            logprobs = chain.from_iterable(event.logprobs for event in run)
            found[position] = Tokens(run[0].request_id, tuple(tokens), tuple(logprobs))
    return found
