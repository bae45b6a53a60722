"""The HTTP edge: the one place where an exception turns into a response that the client can read."""

from __future__ import annotations

import logging

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millstream.api.dialect import Dialects
from millstream.api.disconnect import ClientLeft
from millstream.api.errors import PARAM_LENGTH, REQUEST_ID, printable, shortened
from millstream.api.request_log import log_error
from millstream.api.stream import STREAM_ERROR
from millstream.errors import MillstreamError
from millstream.request_context import RequestContext, in_request

log = logging.getLogger(__name__)

_TRACE, _TRACE_LENGTH = (b"traceparent", b"tracestate"), 512


class Edge:
    """The outermost of our middleware. Before the first byte, an error is an HTTP response in the dialect of the
    request. In a stream that has begun, it is the last chunk."""

    def __init__(self, app: ASGIApp, dialects: Dialects) -> None:
        self._app = app
        self._dialects = dialects

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with in_request(self._context(scope)) as context:
            await self._respond(scope, receive, Reply(send), context)

    def _context(self, scope: Scope) -> RequestContext:
        trace = ((name, value) for name, value in scope["headers"] if name in _TRACE)
        return RequestContext(
            request_id=scope.get(REQUEST_ID, "-"),
            dialect=self._dialects.of(scope).name,
            endpoint=printable(shortened(scope["path"], PARAM_LENGTH)),
            trace={name.decode(): value.decode("latin-1")[:_TRACE_LENGTH] for name, value in trace},
        )

    async def _respond(self, scope: Scope, receive: Receive, reply: Reply, context: RequestContext) -> None:
        try:
            await self._app(scope, receive, reply.send)
        except (ClientLeft, ClientDisconnect):
            log.debug("%s: the client disconnected", _shown(scope))
        except MillstreamError as error:
            if context.reported != id(error):
                log_error(scope["method"], error)
            await self._send_error(error, reply, scope, receive)
        except Exception as error:  # the edge: any failure gets a response, and a trace in the log
            log.error("%s failed", _shown(scope), exc_info=error)
            await self._send_error(MillstreamError("The server failed on this request."), reply, scope, receive)

    async def _send_error(self, error: MillstreamError, reply: Reply, scope: Scope, receive: Receive) -> None:
        error.request_id = scope.get(REQUEST_ID)
        if not reply.started:
            response = self._dialects.of(scope).errors.response(error)
            if any(name == b"expect" for name, _ in scope["headers"]):
                # The client may or may not send the body now, so the connection cannot be reused.
                response.headers["connection"] = "close"
            await response(scope, receive, reply.send)
        elif STREAM_ERROR in scope and not reply.ended:
            last = scope[STREAM_ERROR](error)
            if last is not None:
                await reply.send({"type": "http.response.body", "body": last, "more_body": False})
        # Any other response that broke off stays incomplete: the server then closes the connection.


def _shown(scope: Scope) -> str:
    return f"{printable(scope['method'])} {printable(scope['path'])} [{scope.get(REQUEST_ID, '-')}]"


class Reply:
    """Wraps `send` and records how far the response has come."""

    __slots__ = ("_send", "ended", "started")

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False
        self.ended = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
        elif not message.get("more_body", False):
            self.ended = True
        await self._send(message)
