"""One WebSocket and its session: reads events, sends events, and ends everything when either side leaves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from millstream.api.body import parse_json
from millstream.api.errors import DISCONNECTED
from millstream.api.openai.realtime.client_events import ClientEvents
from millstream.api.openai.realtime.outbox import SocketOutbox
from millstream.api.openai.realtime.server_events import EventRenderer
from millstream.errors import BadRequest, MillstreamError
from millstream.realtime_types import SessionConfig, SessionError
from millstream.service.ports import RealtimeService, RealtimeSession

log = logging.getLogger(__name__)

IDLE_SECONDS = 15 * 60.0
"""Without an event of the client, the session ends."""
MAX_UNREAD = 8 * 2**20
"""Characters that may wait for a client that sends but does not read. Beyond it, the client is not read either."""
NORMAL = 1000
DEFECT = "The server failed on this event."
EVENT_ID = 512


class Connection:
    def __init__(self, socket: WebSocket, service: RealtimeService, *, beta: bool) -> None:
        self._socket = socket
        self._service = service
        self._outbox = SocketOutbox(socket, EventRenderer(beta=beta))

    async def run(self, config: SessionConfig, subprotocol: str | None) -> None:
        """Accepts the connection if the session can be opened; else raises, and the handshake is refused."""
        session = self._service.open(config, self._outbox)
        tasks: list[asyncio.Task[Any]] = []
        try:
            await self._socket.accept(subprotocol)
            tasks = [asyncio.create_task(self._send()), asyncio.create_task(self._read(session))]
            # The reader may be waiting for the session, and then does not see that the client is gone.
            if (gone := self._socket.scope.get(DISCONNECTED)) is not None:
                tasks.append(asyncio.create_task(gone.wait()))
            await asyncio.wait(tasks[1:], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await session.close()
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def _send(self) -> None:
        with contextlib.suppress(WebSocketDisconnect):  # the reader learns of it, too
            await self._outbox.run()

    async def _read(self, session: RealtimeSession) -> None:
        events = ClientEvents(self._service, session)
        while True:
            try:
                async with asyncio.timeout(IDLE_SECONDS):
                    message = await self._socket.receive()
            except TimeoutError:
                await self._socket.close(NORMAL, f"no event for {IDLE_SECONDS:g} s")
                return
            if message["type"] == "websocket.disconnect":
                return
            await self._handle(events, message.get("text"))
            await self._outbox.room(MAX_UNREAD)

    async def _handle(self, events: ClientEvents, text: str | None) -> None:
        event_id = None
        try:
            event = await _parse(text)
            if isinstance(sent := event.get("event_id"), str):
                event_id = sent[:EVENT_ID]
            await events.handle(event)
        except MillstreamError as error:
            self._outbox.put(SessionError(error, event_id))
        except Exception as error:  # a defect ends this event, not the session
            log.error("an event of a realtime session failed", exc_info=error)
            self._outbox.put(SessionError(MillstreamError(DEFECT), event_id))


async def _parse(text: str | None) -> dict[str, Any]:
    if text is None:
        raise BadRequest("Events are JSON in text messages; a binary message came.")
    return await parse_json(text.encode("utf-8", "replace"), lambda event: event, "event")
