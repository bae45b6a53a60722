"""The HTTP edge: the one place where an exception turns into something a client can read."""

from __future__ import annotations

import logging

import orjson
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millstream.api.disconnect import ClientLeft
from millstream.api.errors import error_body, error_response, printable
from millstream.api.sse import EVENT_STREAM, event
from millstream.errors import EngineBusy, MillstreamError, Overloaded

log = logging.getLogger(__name__)


class Edge:
    """Outermost of our middleware. Before the first byte an error is an HTTP answer; in a stream it is an event."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        reply = Reply(send)
        try:
            await self._app(scope, receive, reply.send)
        except (ClientLeft, ClientDisconnect):
            log.debug("%s: the client left", _shown(scope))
        except MillstreamError as error:
            # Full is no fault, and would flood the log.
            if error.status >= 500 and not isinstance(error, EngineBusy | Overloaded):
                log.warning("%s: %s", _shown(scope), printable(error.message))
            await self._tell(error, reply, scope, receive)
        except Exception as error:  # the edge: whatever it was, the client gets an answer and the log a trace
            log.error("%s failed", _shown(scope), exc_info=error)
            await self._tell(MillstreamError("The server failed on this request."), reply, scope, receive)

    async def _tell(self, error: MillstreamError, reply: Reply, scope: Scope, receive: Receive) -> None:
        if not reply.started:
            response = error_response(error)
            if any(name == b"expect" for name, _ in scope["headers"]):
                # Whether the body will still come is now open, so the connection cannot be used again.
                response.headers["connection"] = "close"
            await response(scope, receive, reply.send)
        elif reply.streams_events and not reply.ended:
            # No [DONE] follows: clients raise on the error field, and a missing [DONE] says "not complete" to the rest.
            last = event(orjson.dumps(error_body(error)))
            await reply.send({"type": "http.response.body", "body": last, "more_body": False})
        # A plain answer that broke off halfway stays incomplete: the server then closes the connection.


def _shown(scope: Scope) -> str:
    return f"{printable(scope['method'])} {printable(scope['path'])}"


class Reply:
    """`send`, remembering how far the answer has come."""

    __slots__ = ("_send", "ended", "started", "streams_events")

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False
        self.ended = False
        self.streams_events = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            self.streams_events = (b"content-type", EVENT_STREAM) in message["headers"]
        elif not message.get("more_body", False):
            self.ended = True
        await self._send(message)
