"""Events on their way to the client: rendered, counted, and sent in order."""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.websockets import WebSocket

from millstream.api.openai.realtime.server_events import EventRenderer
from millstream.realtime_types import ServerEvent

ROOM = 128 * 1024
"""Characters that may wait for the client before a session makes more audio: one to two seconds of it."""


class SocketOutbox:
    """Implements `ports.Outbox`. `run` sends until it is cancelled."""

    def __init__(self, socket: WebSocket, renderer: EventRenderer) -> None:
        self._socket = socket
        self._renderer = renderer
        self._waiting: deque[str] = deque()
        self._size = 0
        self._changed = asyncio.Event()
        self._freed = asyncio.Event()

    def put(self, event: ServerEvent) -> None:
        if (text := self._renderer.render(event)) is not None:
            self._waiting.append(text)
            self._size += len(text)
            self._changed.set()

    async def room(self, most: int = ROOM) -> None:
        while self._size > most:
            self._freed.clear()
            await self._freed.wait()

    async def run(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._waiting:
                text = self._waiting.popleft()
                await self._socket.send_text(text)
                self._size -= len(text)
                self._freed.set()
