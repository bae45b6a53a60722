"""uvicorn's HTTP/1.1 protocol, held to limits: a stranger's bytes are counted and timed before they are parsed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from millstream.api.errors import ErrorFormat
from millstream.api.http1.connections import Connections, Phase
from millstream.api.http1.limits import SLICE, HttpLimits
from millstream.api.http1.meter import Meter, Stage
from millstream.api.http1.refusal import refusal
from millstream.errors import BadRequest, MillstreamError, TooManyConnections

log = logging.getLogger(__name__)

VERSIONS = ("1.0", "1.1")
INVALID = "This is not a valid HTTP/1.1 request."
FULL = "All connections of this server are in use. Try again soon, or start it with a higher --max-connections."
RETRY_AFTER = 2


class LimitedProtocol(HttpToolsProtocol):
    """One connection. Requests that are sent ahead wait as bytes, and reading goes on: that is how a client that
    leaves is noticed. uvicorn itself stops reading then, and tells only the last request that its client has left."""

    def __init__(
        self, *, limits: HttpLimits, connections: Connections, error_format: ErrorFormat, **options: Any
    ) -> None:
        super().__init__(**options)
        self._error_format = error_format
        self._limits = limits
        self._connections = connections
        self._meter = Meter(limits, connections.clock)
        self._running: RequestResponseCycle | None = None
        self._held = bytearray()
        self._why: MillstreamError | None = None
        self._upgrading = False
        self._refusal: bytes | None = None
        """What ends this connection. Nothing more is parsed; it is sent when the answers due before it are."""
        self._leaving = False
        """It is sent."""
        self._dropped = 0
        self._unread = 0
        self._unread_since = connections.clock

    # What the transport calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self._connections.join(self):
            self._refuse(TooManyConnections(FULL, retry_after=RETRY_AFTER))

    def connection_lost(self, exc: Exception | None) -> None:
        unfinished = self._unfinished()
        self.pipeline.clear()
        self._held.clear()
        self._connections.leave(self)
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        _tell_gone(unfinished)

    def data_received(self, data: bytes) -> None:
        self._meter.seen = self._connections.clock
        if self._refusal is not None:
            self._dropped += len(data)
            if self._dropped > self._limits.linger_bytes:
                self.transport.abort()
        elif self._held or self._must_wait():
            self._hold(data)
        else:
            self._unset_keepalive_if_required()
            self._feed(data)

    # What `Connections` calls

    def overdue(self) -> None:
        clock = self._connections.clock
        lingers = self._leaving and clock - self._meter.since > self._limits.linger_seconds
        if lingers or self._reads_nothing(clock):
            self.transport.abort()
        elif self._leaving or self._must_wait():
            return
        elif self._meter.stage is Stage.BODY and self.flow.read_paused:
            self._meter.restart(clock)  # it waits for the application
        elif error := self._meter.check_time(clock):
            self._refuse(error)
        elif self.cycle is None and 0 < self._limits.header_seconds < clock - self._meter.since:
            self.transport.close()  # it never sent a byte. After an answer, uvicorn's own keep-alive timeout counts

    def drop(self) -> None:
        """To close alone would wait until the client has read what is left for it."""
        if self._leaving or self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def _reads_nothing(self, clock: float) -> bool:
        """Also of a connection that is closed: it is there until the client has read the rest."""
        left = self.transport.get_write_buffer_size()
        if left == 0 or left != self._unread:
            self._unread, self._unread_since = left, clock
        return 0 < self._limits.write_seconds < clock - self._unread_since

    # From bytes to the parser

    def _feed(self, data: bytes) -> None:
        for start in range(0, len(data), SLICE):
            if start and self._must_wait():
                self._hold(data[start:])
                return
            if not self._parse(data[start : start + SLICE]):
                return

    def _parse(self, piece: bytes) -> bool:
        """False if the connection takes no more."""
        if self._meter.stage is Stage.NOTHING:
            self._begin_head()
        self._meter.add_wire(len(piece))
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            return self._ignore_upgrade(piece[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            log.debug("an invalid request: %s", error)
            self._refuse(self._why or BadRequest(INVALID))
            return False
        answered = self.cycle is not None and self.cycle.response_complete
        if wrong := self._meter.check_size(answered=answered):
            self._refuse(wrong)
        return self._refusal is None

    def _ignore_upgrade(self, rest: bytes) -> bool:
        """Serve the request as if it had not asked for another protocol, as the standard allows. The parser stops
        behind the headers of such a request, so a new one gets them again, without those that ask."""
        self._upgrading = False
        method = self.scope["method"].encode("ascii")
        if method == b"CONNECT":
            self._refuse(BadRequest("This server is no proxy: it does not serve CONNECT."))
            return False
        lines = [method + b" " + self.url + b" HTTP/1.1"]
        lines += [name + b": " + value for name, value in self.headers if name not in (b"upgrade", b"connection")]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._meter.begin(Stage.HEAD)
        return self._parse(b"\r\n".join([*lines, b"", b""]) + rest)

    def _feed_held(self) -> None:
        if self.transport.is_closing() or self._refusal is not None or self._must_wait():
            return
        data = bytes(self._held)
        self._held.clear()
        self._feed(data)

    def _hold(self, data: bytes) -> None:
        self._held += data
        if len(self._held) > self._limits.held_bytes:
            log.debug("closed a connection that sent %d bytes ahead of its answer", len(self._held))
            self._held.clear()
            self.transport.close()

    # What the parser calls. An exception ends the parsing, and `_why` is then the reason.

    def on_message_begin(self) -> None:
        if self._meter.stage is Stage.NOTHING:
            self._begin_head()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._stop_on(self._meter.check_url(len(self.url)))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._stop_on(self._meter.check_header(len(name) + len(value), len(self.headers) + 1))
        if self._meter.stage is Stage.HEAD:  # trailers come after the request has been acted on
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.get_http_version() not in VERSIONS:
            self._stop_on(BadRequest("This server speaks HTTP/1.1 and HTTP/1.0."))
        if self.parser.should_upgrade():
            self.scope["method"] = self.parser.get_method().decode("ascii")
            self._upgrading = True
            return
        if len(self.pipeline) >= self._limits.pipelined:
            self._stop_on(BadRequest(f"More than {self._limits.pipelined} requests were sent ahead of their answers."))
        super().on_headers_complete()
        self._meter.begin(Stage.BODY, self._connections.clock)
        self._note_phase()
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
        self._note_phase()

    def _begin_head(self) -> None:
        self._meter.begin(Stage.HEAD, None if self.cycle is None else self._connections.clock)

    def _keep_reading(self) -> None:
        """uvicorn pauses for a request that waits for another one. `_hold` bounds what comes meanwhile."""
        if self.cycle is not self._running:
            self.flow.resume_reading()

    def _stop_on(self, error: MillstreamError | None) -> None:
        if error is not None:
            self._why = error
            raise error

    # Requests and their answers

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._connections.move(self, Phase.IDLE)
            return
        if self._refusal is not None and not self._busy():
            self._send_refusal()
            return
        self._meter.restart(self._connections.clock)  # what waited for this answer has its time from now on
        self._note_phase()
        if self._held and not self._must_wait():
            self._unset_keepalive_if_required()
            self.loop.call_soon(self._feed_held)

    def _note_phase(self) -> None:
        own_body = self._meter.stage is Stage.BODY and self.cycle is self._running
        busy = Phase.RECEIVING if own_body else Phase.SERVING
        self._connections.move(self, busy if self._busy() else Phase.IDLE)

    def _busy(self) -> bool:
        return self._running is not None and not self._running.response_complete and not self._running.disconnected

    def _must_wait(self) -> bool:
        """An answer is due before anything else may be parsed, except the body of its own request."""
        return self._busy() and not (self._meter.stage is Stage.BODY and self.cycle is self._running)

    def _unfinished(self) -> list[RequestResponseCycle]:
        waiting = [cycle for cycle, _ in self.pipeline]
        return waiting if self._running is None else [self._running, *waiting]

    # Refusals

    def _refuse(self, error: MillstreamError) -> None:
        """Answer with an error, after the answers that are due before it, and close."""
        if self._refusal is not None:
            return
        self._refusal = refusal(error, self._error_format)
        if self._meter.stage is not Stage.BODY:
            if not self._busy():
                self._send_refusal()
        elif self.cycle is not self._running:
            self.pipeline.popleft()  # the newest: its body will not come
        elif self.cycle.response_started:
            self.transport.close()  # its answer is under way or complete: there is no place for another
        else:
            self._send_refusal()

    def _send_refusal(self) -> None:
        """Half-close and linger: closing with bytes unread is a reset, and the client would lose the answer."""
        assert self._refusal is not None
        _tell_gone(self._unfinished())
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        self._leaving = True
        self._meter.begin(Stage.NOTHING, self._connections.clock)
        self._connections.move(self, Phase.LEAVING)
        if not self.transport.is_closing():
            self.transport.write(self._refusal)
            self.transport.write_eof()


def _tell_gone(cycles: Sequence[RequestResponseCycle]) -> None:
    for cycle in cycles:
        if not cycle.response_complete:
            cycle.disconnected = True
        cycle.message_event.set()
