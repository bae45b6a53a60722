"""Gives every request an id. Its response carries it in a header, and the log lines of a failure name it."""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Awaitable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millstream.api.errors import REQUEST_ID
from millstream.api.reply import REPLY, Reply

HEADERS = (b"x-request-id", b"request-id")
"""OpenAI's name and Anthropic's."""
_SANE = re.compile(rb"[\x21-\x7e]{1,128}")


_START = secrets.token_hex(4)
_NUMBERS = itertools.count(secrets.randbits(31))


def new_request_id() -> str:
    """Ids differ between servers and starts, but need not be secret: a counter costs less than random bytes."""
    return f"req_{_START}{next(_NUMBERS):08x}"


class RequestIds:
    """Takes the id from `x-request-id` if the client sent a sane one, and makes one otherwise. As the outermost
    middleware it also makes the `Reply`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] not in ("http", "websocket"):
            return self._app(scope, receive, send)
        request_id = _sent_id(scope) or new_request_id()
        value = request_id.encode("ascii")

        def add_id(message: Message) -> None:
            others = [field for field in message["headers"] if field[0].lower() not in HEADERS]
            message["headers"] = [*others, (HEADERS[0], value), (HEADERS[1], value)]

        reply = Reply(send)
        reply.change_head(add_id)
        return self._app({**scope, REQUEST_ID: request_id, REPLY: reply}, receive, reply.send)


def _sent_id(scope: Scope) -> str | None:
    sent = [value for name, value in scope["headers"] if name == HEADERS[0]]
    return sent[0].decode("ascii") if len(sent) == 1 and _SANE.fullmatch(sent[0]) else None
