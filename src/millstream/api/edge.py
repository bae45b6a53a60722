"""The HTTP edge: the one place where an exception turns into a response that the client can read."""

from __future__ import annotations

import asyncio
import logging

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketDisconnect

from millstream.api.dialect import Dialects
from millstream.api.disconnect import ClientLeft
from millstream.api.errors import PARAM_LENGTH, REQUEST_ID, ErrorFormat, printable, shortened, told
from millstream.api.reply import REPLY, Reply
from millstream.api.request_log import log_error
from millstream.api.stream import STREAM_ERROR
from millstream.errors import EngineGone, MillstreamError
from millstream.request_context import RequestContext, in_request

log = logging.getLogger(__name__)

STOPPING = "the server is shutting down"
WS_FAILED = 1011
"""Close code of a WebSocket: the server failed."""
WS_REASON = 40
"""Characters of a reason: it must fit into 123 bytes."""

_TRACE, _TRACE_LENGTH = (b"traceparent", b"tracestate"), 512


class Edge:
    """The outermost of our middleware. Before the first byte, an error is an HTTP response in the dialect of the
    request. In a stream that has begun, it is the last chunk."""

    def __init__(self, app: ASGIApp, dialects: Dialects) -> None:
        self._app = app
        self._dialects = dialects

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            with in_request(self._context(scope)):
                await self._converse(scope, receive, Handshake(send))
        elif scope["type"] == "http":
            with in_request(self._context(scope)) as context:
                await self._respond(scope, receive, send, context)
        else:
            await self._app(scope, receive, send)

    def _context(self, scope: Scope) -> RequestContext:
        trace = ((name, value) for name, value in scope["headers"] if name in _TRACE)
        return RequestContext(
            request_id=scope.get(REQUEST_ID, "-"),
            dialect=self._dialects.of(scope).name,
            endpoint=printable(shortened(scope["path"], PARAM_LENGTH)),
            trace={name.decode(): value.decode("latin-1")[:_TRACE_LENGTH] for name, value in trace},
        )

    async def _respond(self, scope: Scope, receive: Receive, send: Send, context: RequestContext) -> None:
        try:
            await self._app(scope, receive, send)
        except (ClientLeft, ClientDisconnect):
            log.debug("%s: the client disconnected", _shown(scope))
        except MillstreamError as error:
            if context.reported != id(error):
                log_error(scope["method"], error)
            await self._send_error(error, scope, receive, send)
        except asyncio.CancelledError:  # nothing else cancels this task: the server stops, and waits no longer
            await self._send_error(EngineGone(STOPPING, retry_after=None), scope, receive, send)
        except Exception as error:  # the edge: any failure gets a response, and a trace in the log
            log.error("%s failed", _shown(scope), exc_info=error)
            await self._send_error(MillstreamError("The server failed on this request."), scope, receive, send)

    async def _converse(self, scope: Scope, receive: Receive, handshake: Handshake) -> None:
        """Before a WebSocket is accepted, an error is an HTTP response. After that, it ends the connection."""
        try:
            await self._app(scope, receive, handshake.send)
        except (ClientLeft, ClientDisconnect, WebSocketDisconnect):
            log.debug("%s: the client disconnected", _shown(scope))
        except MillstreamError as error:
            log_error("GET", error)
            await handshake.refuse(error, self._dialects.of(scope).errors, scope)
        except asyncio.CancelledError:
            await handshake.refuse(EngineGone(STOPPING, retry_after=None), self._dialects.of(scope).errors, scope)
        except Exception as error:  # the edge, as for HTTP
            log.error("%s failed", _shown(scope), exc_info=error)
            failed = MillstreamError("The server failed on this connection.")
            await handshake.refuse(failed, self._dialects.of(scope).errors, scope)

    async def _send_error(self, error: MillstreamError, scope: Scope, receive: Receive, send: Send) -> None:
        error.request_id = scope.get(REQUEST_ID)
        reply: Reply = scope[REPLY]
        if not reply.started:
            response = self._dialects.of(scope).errors.response(error)
            if any(name == b"expect" for name, _ in scope["headers"]):
                # The client may or may not send the body now, so the connection cannot be reused.
                response.headers["connection"] = "close"
            await response(scope, receive, send)
        elif STREAM_ERROR in scope and not reply.ended:
            last = scope[STREAM_ERROR](error)
            if last is not None:
                await send({"type": "http.response.body", "body": last, "more_body": False})
        # Any other response that broke off stays incomplete: the server then closes the connection.


def _shown(scope: Scope) -> str:
    return f"{printable(scope.get('method', 'WebSocket'))} {printable(scope['path'])} [{scope.get(REQUEST_ID, '-')}]"


class Handshake:
    """Wraps the `send` of a WebSocket and records how far it has come."""

    __slots__ = ("_send", "_state")

    def __init__(self, send: Send) -> None:
        self._send = send
        self._state = "new"

    async def send(self, message: Message) -> None:
        self._state = {"websocket.accept": "open", "websocket.send": "open"}.get(message["type"], "closed")
        await self._send(message)

    async def refuse(self, error: MillstreamError, form: ErrorFormat, scope: Scope) -> None:
        error.request_id = scope.get(REQUEST_ID)
        if self._state == "new":
            body = form.body(error)
            headers = {"content-type": form.media_type, **form.headers(error)}
            raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
            await self.send({"type": "websocket.http.response.start", "status": form.status(error), "headers": raw})
            await self.send({"type": "websocket.http.response.body", "body": body})
        elif self._state == "open":
            await self.send({"type": "websocket.close", "code": WS_FAILED, "reason": told(error)[:WS_REASON]})
