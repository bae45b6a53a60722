"""How far the response to a request has come, and what is added to its head: one layer around `send` for all
middleware."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.types import Message, Send

REPLY = "millstream.reply"
"""Key of the ASGI scope: the `Reply` of the request."""
_BODY, _START = "http.response.body", "http.response.start"
HEADS = (_START, "websocket.http.response.start", "websocket.accept")
"""Messages with headers."""

ChangeHead = Callable[[Message], None]
"""Changes the headers of a message in place."""


class Reply:
    """Wraps `send`. Each layer of its own would cost a coroutine for each message."""

    __slots__ = ("_changes", "_send", "ended", "started")

    def __init__(self, send: Send) -> None:
        self._send = send
        self._changes: list[ChangeHead] = []
        self.started = False
        self.ended = False

    def change_head(self, change: ChangeHead) -> None:
        """Of a head that is sent later. What was added last, by the innermost middleware, comes first."""
        self._changes.append(change)

    def send(self, message: Message) -> Awaitable[None]:
        kind = message["type"]
        if kind == _BODY:
            if not message.get("more_body", False):
                self.ended = True
        elif kind in HEADS:
            self.started = kind == _START
            message["headers"] = list(message.get("headers", ()))
            for change in reversed(self._changes):
                change(message)
        return self._send(message)
