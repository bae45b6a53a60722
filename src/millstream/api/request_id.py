"""Gives every request an id. Its response carries it in a header, and the log lines of a failure name it."""

from __future__ import annotations

import itertools
import re
import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millstream.api.errors import REQUEST_ID

HEADERS = (b"x-request-id", b"request-id")
"""OpenAI's name and Anthropic's."""
_STARTS = ("http.response.start", "websocket.http.response.start", "websocket.accept")
_SANE = re.compile(rb"[\x21-\x7e]{1,128}")


_START = secrets.token_hex(4)
_NUMBERS = itertools.count(secrets.randbits(31))


def new_request_id() -> str:
    """Ids differ between servers and starts, but need not be secret: a counter costs less than random bytes."""
    return f"req_{_START}{next(_NUMBERS):08x}"


class RequestIds:
    """Takes the id from `x-request-id` if the client sent a sane one, and makes one otherwise."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        request_id = _sent_id(scope) or new_request_id()
        value = request_id.encode("ascii")

        async def send_with_id(message: Message) -> None:
            if message["type"] in _STARTS:
                others = [(name, field) for name, field in message.get("headers", ()) if name.lower() not in HEADERS]
                message = {**message, "headers": [*others, *((name, value) for name in HEADERS)]}
            await send(message)

        await self._app({**scope, REQUEST_ID: request_id}, receive, send_with_id)


def _sent_id(scope: Scope) -> str | None:
    sent = [value for name, value in scope["headers"] if name == HEADERS[0]]
    return sent[0].decode("ascii") if len(sent) == 1 and _SANE.fullmatch(sent[0]) else None
