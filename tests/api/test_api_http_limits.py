"""Slow clients and too many of them: each limit, and the error that reports it."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import threading
from contextlib import ExitStack

import pytest

from millstream.api.app import create_app
from millstream.api.http1.connections import Connections, Phase
from millstream.api.http1.limits import HttpLimits
from millstream.types import Delta
from support.services import services

WAIT = 60
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n"
QUICK = HttpLimits(header_seconds=0.2, body_seconds=0.2, linger_seconds=0.2)


@pytest.fixture(params=["uvloop", "asyncio"])
def start(request, serve, service):
    def start(limits, **options):
        return serve(create_app(services(service), body_limit=10**6), loop=request.param, limits=limits, **options)

    return start


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=WAIT)


def read_all(line: socket.socket) -> bytes:
    text = b""
    while data := line.recv(65536):
        text += data
    return text


def error(response: bytes) -> tuple[int, dict[str, object]]:
    head, _, body = response.partition(b"\r\n\r\n")
    assert b"connection: close" in head and b"content-type: application/json" in head
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.mark.parametrize(
    "sent, code, words",
    [
        (GET[:30], "request_timeout", "--header-timeout"),
        (b"G", "request_timeout", "--header-timeout"),
        (b"\r\n", "request_timeout", "--header-timeout"),
        (HEAD, "request_timeout", "--body-timeout"),
        (HEAD + b"x" * 999, "request_timeout", "--body-timeout"),
    ],
)
def test_a_request_that_stops_halfway(start, caplog, sent, code, words):
    with start(QUICK) as port, connect(port) as line:
        line.sendall(sent)
        status, found = error(read_all(line))
        assert (status, found["code"]) == (408, code) and words in found["message"]
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_request_that_stops_halfway_after_another(start):
    with start(QUICK) as port, connect(port) as line:
        line.sendall(GET + GET[:30])
        assert re.findall(rb"HTTP/1.1 (\d+)", read_all(line)) == [b"200", b"408"]


@pytest.mark.parametrize("sent", [GET[:-4] + b"\r\na: ", HEAD])
def test_a_request_that_trickles(start, sent):
    """An occasional byte does not keep the connection alive."""
    ended = threading.Event()
    with start(QUICK) as port, connect(port) as line:
        line.sendall(sent)

        def trickle() -> None:
            try:
                while not ended.wait(0.05):
                    line.sendall(b"x")
            except OSError:
                return

        feeder = threading.Thread(target=trickle)
        feeder.start()
        response = line.recv(65536)
        ended.set()
        feeder.join()
    assert error(response)[0] == 408


def test_a_connection_that_sends_nothing_is_closed(start):
    with start(QUICK) as port, connect(port) as line:
        assert read_all(line) == b""


def test_a_refused_client_that_keeps_sending_is_aborted(start):
    with start(QUICK) as port, connect(port) as line:
        line.sendall(b"nonsense\r\n\r\n")
        assert line.recv(65536).startswith(b"HTTP/1.1 400")
        ended = threading.Event()
        for _ in range(200):
            try:
                line.sendall(b"x")
            except OSError:
                return
            ended.wait(0.05)
        pytest.fail("it lingers")


def test_a_slow_response_is_no_slow_client(start, service):
    service.steps, service.ends = [], False
    with start(QUICK) as port, connect(port) as line:
        body = b'{"prompt": "x"}'
        line.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 15\r\n\r\n" + body)
        generation = service.generation()
        assert not generation.cancelled.wait(1)
        generation.push([Delta(0, "late")])
        generation.push(None)
        text = b""
        while b"late" not in text:
            text += line.recv(65536)


@pytest.mark.parametrize("headers", [b"", b"connection: close\r\n"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_never_reads_is_aborted(start, service, headers, stream):
    service.steps = [(Delta(0, "x" * 1_000_000),)] * 30
    body = b'{"prompt": "x", "stream": %s}' % (b"true" if stream else b"false")
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n%bcontent-length: %d\r\n\r\n" % (headers, len(body))
    limits = HttpLimits(write_seconds=0.4)
    with start(limits) as port, connect(port) as line:
        line.sendall(head + body)
        generation = service.generation()
        assert generation.cancelled.wait(WAIT) and generation.left_early is stream
        pause = threading.Event()
        for _ in range(200):
            try:
                line.sendall(b"x")
            except OSError:
                return
            pause.wait(0.05)
        pytest.fail("it is still there")


def test_0_disables_a_timeout(start):
    with start(HttpLimits(header_seconds=0, body_seconds=0, linger_seconds=0.2)) as port, connect(port) as line:
        line.sendall(GET[:20])
        line.settimeout(1)
        with pytest.raises(TimeoutError):
            line.recv(1)
        line.sendall(GET[20:])
        assert line.recv(65536).startswith(b"HTTP/1.1 200")


def served(line: socket.socket) -> bool:
    line.sendall(GET)
    text = b""
    while not text.endswith(b"}}"):
        text += line.recv(65536)
    return text.startswith(b"HTTP/1.1 200")


def test_idle_connections_are_closed_for_new_ones(start, caplog):
    with ExitStack() as stack:
        port = stack.enter_context(start(HttpLimits(connections=3), timeout_keep_alive=60))
        used, unused, partial = (stack.enter_context(connect(port)) for _ in range(3))
        partial.sendall(GET[:20])
        assert served(used) and served(used), "after the second request, the others have been accepted"
        for oldest in (unused, partial, used):
            line = stack.enter_context(connect(port))
            assert served(line) and oldest.recv(1) == b"", "the one that has been idle longest is closed"
        assert served(line)
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "--max-connections 3" in record.getMessage()


def test_a_new_connection_is_refused_if_all_are_busy(start, service, caplog):
    service.steps, service.ends = [], False
    with ExitStack() as stack:
        port = stack.enter_context(start(HttpLimits(connections=2)))
        lines = [stack.enter_context(connect(port)) for _ in range(2)]
        body = b'{"prompt": "x"}'
        for line in lines:
            line.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 15\r\n\r\n" + body)
        generations = [service.generation() for _ in lines]
        for _ in range(20):
            with connect(port) as refused:
                refused.sendall(GET)
                response = read_all(refused)
            status, found = error(response)
            assert (status, found["code"], found["type"]) == (503, "too_many_connections", "server_error")
            assert b"retry-after: 2\r\n" in response and "--max-connections" in found["message"]
        for generation in generations:
            assert not generation.cancelled.is_set()
            generation.push(None)
        for line in lines:
            assert line.recv(65536).startswith(b"HTTP/1.1 200")
        assert served(stack.enter_context(connect(port)))
    records = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(records) == 1, "the log is not flooded"


class Dropped:
    """A connection that records that it was dropped."""

    def __init__(self) -> None:
        self.dropped = False

    def check_timeouts(self) -> None:
        return

    def drop(self) -> None:
        self.dropped = True


def test_refused_connections_linger_in_small_numbers():
    async def main():
        connections = Connections(HttpLimits(connections=8))
        lines = [Dropped() for _ in range(6)]
        for line in lines:
            assert connections.join(line)
            connections.move(line, Phase.LEAVING)
        assert [line.dropped for line in lines] == [True] * 4 + [False] * 2
        assert connections.count(Phase.LEAVING) == 2
        for line in lines:
            connections.leave(line)

    asyncio.run(main())


def test_the_cap_reserves_open_files():
    limits = HttpLimits(connections=1000, reserve=256)
    assert limits.connections_within(None) == 1000
    assert limits.connections_within(65_536) == 1000
    assert limits.connections_within(1024) == 768
    assert limits.connections_within(256) == 128
    assert limits.connections_within(1) == 1
