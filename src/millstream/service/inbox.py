"""Where the events of one client's request wait for the task that reads them."""

from __future__ import annotations

import asyncio

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
        return events
