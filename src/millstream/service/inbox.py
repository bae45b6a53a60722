"""Where the events of one client's request wait for the task that reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import chain

from millstream.engine.messages import Failed, Finished, PromptRead, Tokens

TURN = 32
"""The most events that a reader takes at once."""

RequestEvent = PromptRead | Tokens | Finished | Failed


class Inbox:
    """The events of one client's request, which may be several of the engine's. Read by one task."""

    def __init__(self) -> None:
        self._events: list[RequestEvent] = []
        self._arrived: asyncio.Future[None] | None = None

    def push(self, event: RequestEvent) -> None:
        self._events.append(event)
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    async def take(self) -> list[RequestEvent]:
        """What has come; waits until there is something. A slow reader gets several steps at once, but not so many
        that others wait long for their turn of the event loop."""
        if self._events:
            await asyncio.sleep(0)
        while not self._events:
            self._arrived = asyncio.get_running_loop().create_future()
            try:
                await self._arrived
            finally:
                self._arrived = None
        events, self._events = self._events[:TURN], self._events[TURN:]
        return events if len(events) == 1 else joined(events)


def joined(events: Sequence[RequestEvent]) -> list[RequestEvent]:
    """The tokens of a request that wait together as one event: to read many at once costs little more than one."""
    found: list[RequestEvent] = []
    runs: dict[int, list[Tokens]] = {}
    whole: list[tuple[int, list[Tokens]]] = []
    for event in events:
        if not isinstance(event, Tokens):
            runs.pop(event.request_id, None)
            found.append(event)
        elif event.request_id in runs:
            runs[event.request_id].append(event)
        else:
            runs[event.request_id] = [event]
            whole.append((len(found), runs[event.request_id]))
            found.append(event)
    for place, run in whole:
        if len(run) > 1:
            tokens = chain.from_iterable(event.tokens for event in run)
            logprobs = chain.from_iterable(event.logprobs for event in run)
            found[place] = Tokens(run[0].request_id, tuple(tokens), tuple(logprobs))
    return found
