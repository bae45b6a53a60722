"""uvicorn's HTTP/1.1 protocol with limits: bytes of untrusted clients are counted and timed before they are parsed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from millstream.api.disconnect import DEPARTURE
from millstream.api.errors import ErrorFormat
from millstream.api.http1.connections import Connections, Phase
from millstream.api.http1.direct import CycleDeparture, CycleWriter
from millstream.api.http1.limits import SLICE, HttpLimits
from millstream.api.http1.meter import Meter, Stage
from millstream.api.http1.refusal import refusal
from millstream.api.http1.websocket import LimitedWebSocket, take_over
from millstream.api.stream import DIRECT_WRITER
from millstream.errors import BadRequest, MillstreamError, TooManyConnections

log = logging.getLogger(__name__)

VERSIONS = ("1.0", "1.1")
INVALID = "This is not a valid HTTP/1.1 request."
FULL = "All connections of this server are in use. Try again soon, or start it with a higher --max-connections."
RETRY_AFTER = 2

TakeTurn = Callable[[Callable[[], None]], None]
"""Calls it now or soon, on the event loop."""


def _at_once(call: Callable[[], None]) -> None:
    call()


class LimitedProtocol(HttpToolsProtocol):
    """One connection. Pipelined requests wait as bytes while reading continues, which is how a disconnect is noticed.
    uvicorn itself stops reading then, and reports a disconnect to the last request only."""

    def __init__(
        self,
        *,
        limits: HttpLimits,
        connections: Connections,
        error_format: ErrorFormat,
        is_websocket: Callable[[bytes], bool] = lambda path: False,
        take_turn: TakeTurn = _at_once,
        **options: Any,
    ) -> None:
        """`is_websocket` tells of a raw path whether WebSockets are served there. `take_turn`: what has come is parsed
        when it calls."""
        super().__init__(**options)
        self._take_turn = take_turn
        self._is_websocket = is_websocket
        self._error_format = error_format
        self._limits = limits
        self._connections = connections
        self._meter = Meter(limits, connections.clock)
        self._running: RequestResponseCycle | None = None
        self._pipelined = bytearray()
        self._received = bytearray()
        """Bytes that wait for their turn to be parsed."""
        self._parse_error: MillstreamError | None = None
        self._upgrading = False
        self._refusal: bytes | None = None
        """The error response that ends this connection. Nothing more is parsed. It is sent after the responses that are
        due before it."""
        self._leaving = False
        """True once the refusal is sent."""
        self._dropped = 0
        self._unread = 0
        self._unread_since = connections.clock

    # Called by the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self._connections.join(self):
            self._refuse(TooManyConnections(FULL, retry_after=RETRY_AFTER))

    def connection_lost(self, exc: Exception | None) -> None:
        unfinished = self._unfinished()
        self.pipeline.clear()
        self._pipelined.clear()
        self._received.clear()
        self._connections.leave(self)
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        _report_disconnect(unfinished)

    def data_received(self, data: bytes) -> None:
        self._meter.last_byte = self._connections.clock
        if self._refusal is not None:
            self._dropped += len(data)
            if self._dropped > self._limits.linger_bytes:
                self.transport.abort()
        elif self._received:
            self._received += data
            if len(self._received) > SLICE:
                self.flow.pause_reading()
        elif self._pipelined or self._must_wait():
            self._hold(data)
        else:
            self._unset_keepalive_if_required()
            self._received += data
            self._take_turn(self._feed_received)

    # Called by `Connections`

    def check_timeouts(self) -> None:
        clock = self._connections.clock
        lingers = self._leaving and clock - self._meter.since > self._limits.linger_seconds
        if lingers or self._is_stalled(clock):
            self.transport.abort()
        elif self._leaving or self._must_wait():
            return
        elif self._meter.stage is Stage.BODY and self.flow.read_paused:
            self._meter.restart(clock)  # waiting for the application
        elif error := self._meter.check_time(clock):
            self._refuse(error)
        elif self.cycle is None and 0 < self._limits.header_seconds < clock - self._meter.since:
            self.transport.close()  # it never sent a byte. After a response, uvicorn's own keep-alive timeout applies

    def drop(self) -> None:
        """Abort if output is pending: `close` would wait until the client has read it."""
        if self._leaving or self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def _is_stalled(self, clock: float) -> bool:
        """True if the client has read none of its output for too long. Also applies to a closing connection, which
        stays open until the client has read the rest."""
        unread = self.transport.get_write_buffer_size()
        if unread == 0 or unread != self._unread:
            self._unread, self._unread_since = unread, clock
        return 0 < self._limits.write_seconds < clock - self._unread_since

    # From bytes to the parser

    def _feed_received(self) -> None:
        data = bytes(self._received)
        self._received.clear()
        if self.transport.is_closing() or self._refusal is not None:
            return
        self.flow.resume_reading()
        self._feed(data)

    def _feed(self, data: bytes) -> None:
        for start in range(0, len(data), SLICE):
            if start and self._must_wait():
                self._hold(data[start:])
                return
            if not self._parse(data[start : start + SLICE]):
                return

    def _parse(self, piece: bytes) -> bool:
        """Returns False if the connection accepts no more input."""
        if self._meter.stage is Stage.NOTHING:
            self._begin_head()
        self._meter.add_wire(len(piece))
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            rest = piece[upgrade.args[0] :]
            return self._upgrade() if self._becomes_websocket(rest) else self._ignore_upgrade(rest)
        except httptools.HttpParserError as error:
            log.debug("invalid request: %s", error)
            self._refuse(self._parse_error or BadRequest(INVALID))
            return False
        responded = self.cycle is not None and self.cycle.response_complete
        if excess := self._meter.check_size(responded=responded):
            self._refuse(excess)
        return self._refusal is None

    def _becomes_websocket(self, rest: bytes) -> bool:
        """True for the handshake of a WebSocket at a path that speaks it. A client must wait for the answer before it
        sends more, and no other response may be due."""
        if rest or self._busy() or self.pipeline or self._get_upgrade() != b"websocket":
            return False
        return self.scope["method"] == "GET" and self._is_websocket(self.url.partition(b"?")[0])

    def _upgrade(self) -> bool:
        lines = [b"GET " + self.url + b" HTTP/1.1", *(name + b": " + value for name, value in self.headers)]
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        self.connections.discard(self)
        protocol = LimitedWebSocket(
            limits=self._limits,
            connections=self._connections,
            config=self.config,
            server_state=self.server_state,
            app_state=self.app_state,
        )
        take_over(self.transport, protocol, b"\r\n".join([*lines, b"", b""]), self._connections, self)
        return False

    def _ignore_upgrade(self, rest: bytes) -> bool:
        """Serve the request as if it had not asked for an upgrade, as the standard allows. The parser stops after the
        headers of such a request, so a new parser gets them again, without those that ask for the upgrade."""
        self._upgrading = False
        method = self.scope["method"].encode("ascii")
        if method == b"CONNECT":
            self._refuse(BadRequest("This server is not a proxy: it does not support CONNECT."))
            return False
        lines = [method + b" " + self.url + b" HTTP/1.1"]
        lines += [name + b": " + value for name, value in self.headers if name not in (b"upgrade", b"connection")]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._meter.begin(Stage.HEAD)
        return self._parse(b"\r\n".join([*lines, b"", b""]) + rest)

    def _feed_pipelined(self) -> None:
        if self.transport.is_closing() or self._refusal is not None or self._must_wait():
            return
        data = bytes(self._pipelined)
        self._pipelined.clear()
        self._feed(data)

    def _hold(self, data: bytes) -> None:
        self._pipelined += data
        if len(self._pipelined) > self._limits.pipelined_bytes:
            log.debug("closed a connection that sent %d bytes ahead of its response", len(self._pipelined))
            self._pipelined.clear()
            self.transport.close()

    # Called by the parser. An exception stops it, and `_parse_error` is then the reason.

    def on_message_begin(self) -> None:
        if self._meter.stage is Stage.NOTHING:
            self._begin_head()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._stop_on(self._meter.check_url(len(self.url)))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._stop_on(self._meter.check_header(len(name) + len(value), len(self.headers) + 1))
        if self._meter.stage is Stage.HEAD:  # ignore trailers: the request is being served already
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.get_http_version() not in VERSIONS:
            self._stop_on(BadRequest("This server speaks HTTP/1.1 and HTTP/1.0."))
        if self.parser.should_upgrade():
            self.scope["method"] = self.parser.get_method().decode("ascii")
            self._upgrading = True
            return
        if len(self.pipeline) >= self._limits.pipelined:
            self._stop_on(
                BadRequest(f"More than {self._limits.pipelined} requests were sent ahead of their responses.")
            )
        super().on_headers_complete()
        self._meter.begin(Stage.BODY, self._connections.clock)
        self._update_phase()
        self._keep_reading()

    def on_body(self, body: bytes) -> None:
        self._meter.add_body(len(body))
        super().on_body(body)
        self._keep_reading()

    def on_message_complete(self) -> None:
        if self._upgrading:
            return
        self._meter.begin(Stage.NOTHING, self._connections.clock)
        super().on_message_complete()
        self._update_phase()

    def _begin_head(self) -> None:
        self._meter.begin(Stage.HEAD, None if self.cycle is None else self._connections.clock)

    def _keep_reading(self) -> None:
        """Undo uvicorn's pause for a request that waits for another one. `_hold` limits what arrives meanwhile."""
        if self.cycle is not self._running:
            self.flow.resume_reading()

    def _stop_on(self, error: MillstreamError | None) -> None:
        if error is not None:
            self._parse_error = error
            raise error

    # Requests and their responses

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        scope = cast("dict[str, Any]", cycle.scope)
        scope[DIRECT_WRITER] = CycleWriter(cycle)
        scope[DEPARTURE] = CycleDeparture(cycle)
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        if self._running is not None:
            _forget(self._running)
        super().on_response_complete()
        if self.transport.is_closing():
            self._connections.move(self, Phase.IDLE)
            return
        if self._refusal is not None and not self._busy():
            self._send_refusal()
            return
        self._meter.restart(self._connections.clock)  # the time of a request that waited for this response starts now
        self._update_phase()
        if self._pipelined and not self._must_wait():
            self._unset_keepalive_if_required()
            self.loop.call_soon(self._feed_pipelined)

    def _update_phase(self) -> None:
        own_body = self._meter.stage is Stage.BODY and self.cycle is self._running
        busy = Phase.RECEIVING if own_body else Phase.SERVING
        self._connections.move(self, busy if self._busy() else Phase.IDLE)

    def _busy(self) -> bool:
        return self._running is not None and not self._running.response_complete and not self._running.disconnected

    def _must_wait(self) -> bool:
        """True while a response is due, before which nothing may be parsed but the body of its own request."""
        return self._busy() and not (self._meter.stage is Stage.BODY and self.cycle is self._running)

    def _unfinished(self) -> list[RequestResponseCycle]:
        waiting = [cycle for cycle, _ in self.pipeline]
        return waiting if self._running is None else [self._running, *waiting]

    # Refusals

    def _refuse(self, error: MillstreamError) -> None:
        """Send an error, after the responses that are due before it, and close the connection."""
        if self._refusal is not None:
            return
        self._refusal = refusal(error, self._error_format)
        if self._meter.stage is not Stage.BODY:
            if not self._busy():
                self._send_refusal()
        elif self.cycle is not self._running:
            self.pipeline.popleft()  # the newest: its body will not arrive
        elif self.cycle.response_started:
            self.transport.close()  # its response has begun, so no other can be sent
        else:
            self._send_refusal()

    def _send_refusal(self) -> None:
        """Half-close and linger: closing with unread input is a reset, and the client would lose the error."""
        assert self._refusal is not None
        _report_disconnect(self._unfinished())
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        self._leaving = True
        self._meter.begin(Stage.NOTHING, self._connections.clock)
        self._connections.move(self, Phase.LEAVING)
        if not self.transport.is_closing():
            self.transport.write(self._refusal)
            self.transport.write_eof()


def _report_disconnect(cycles: Sequence[RequestResponseCycle]) -> None:
    for cycle in cycles:
        if not cycle.response_complete:
            cycle.disconnected = True
            if (departure := cast("dict[str, Any]", cycle.scope).get(DEPARTURE)) is not None:
                departure.left()
        cycle.message_event.set()
        _forget(cycle)


def _forget(cycle: RequestResponseCycle) -> None:
    """Drop what refers to the cycle and is held by it: otherwise all of a request would wait for the garbage collector,
    which stops the event loop for as long as there is garbage."""
    scope = cast("dict[str, Any]", cycle.scope)
    scope.pop(DIRECT_WRITER, None)
    scope.pop(DEPARTURE, None)
