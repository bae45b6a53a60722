"""uvicorn's WebSocket protocol with the limits of this server: it counts as a connection, and must be read."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from millstream.api.errors import DISCONNECTED
from millstream.api.http1.connections import Connections
from millstream.api.http1.limits import HttpLimits

MAX_MESSAGE = 16 * 2**20
"""Bytes. OpenAI's clients send up to 15 MiB of audio in one event."""
NOT_ACCEPTED = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
PING_SECONDS = 20.0
"""Between two pings, and for the answer to one."""


class LimitedWebSocket(WebSocketsSansIOProtocol):
    """One connection after its upgrade. Messages that the application has not taken yet pause the reading, and output
    that the client does not take ends the connection."""

    def __init__(self, *, limits: HttpLimits, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._limits = limits
        self._registry = connections
        self._gone = asyncio.Event()
        self._unread = 0
        self._unread_since = connections.clock

    async def run_asgi(self) -> None:
        cast(dict[str, Any], self.scope)[DISCONNECTED] = self._gone
        await super().run_asgi()

    async def send(self, message: Any) -> None:
        await super().send(message)
        if message["type"] == "websocket.http.response.body":
            self.handshake_complete = True  # uvicorn would log that there was no answer

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone.set()
        self._registry.leave(self)
        super().connection_lost(exc)

    def keepalive_timeout(self) -> None:
        """While reading is paused, a pong waits behind the messages that came before it."""
        if self.read_paused and self.ping_timeout is not None:
            self.pong_timer = self.loop.call_later(self.ping_timeout, self.keepalive_timeout)
            return
        super().keepalive_timeout()

    # Called by `Connections`

    def check_timeouts(self) -> None:
        unread = self.transport.get_write_buffer_size()
        clock = self._registry.clock
        if unread == 0 or unread != self._unread:
            self._unread, self._unread_since = unread, clock
        elif 0 < self._limits.write_seconds < clock - self._unread_since:
            self.transport.abort()

    def drop(self) -> None:
        self.transport.abort()


def take_over(
    transport: asyncio.Transport, protocol: LimitedWebSocket, request: bytes, connections: Connections, old: Any
) -> None:
    """Hand a connection over from its HTTP protocol, with the bytes of the request that asked for it."""
    connections.replace(old, protocol)
    protocol.connection_made(transport)
    transport.set_protocol(protocol)
    protocol.data_received(request)
    if not protocol.handshake_initiated:  # a header that the HTTP parser takes, and the WebSocket library does not
        transport.write(NOT_ACCEPTED)
        transport.close()
