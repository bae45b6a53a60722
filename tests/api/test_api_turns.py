"""Bytes of clients are parsed when it is their turn: whole, in order, and only if the client still waits."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

from millstream.api.app import create_app
from millstream.api.stream import DIRECT_WRITER
from support.services import services

WAIT = 60
BODY_LIMIT = 2**20


class Gate:
    """Holds all calls until it is opened, on any thread. Then they follow each other, one per turn of the loop."""

    def __init__(self) -> None:
        self.held: list[Callable[[], None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def take_turn(self, call: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self.held.append(call)

    def wait_for(self, count: int) -> None:
        until(lambda: len(self.held) >= count)

    def open(self) -> None:
        assert self._loop is not None
        held, self.held = self.held, []
        for call in held:
            self._loop.call_soon_threadsafe(call)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture(params=["uvloop", "asyncio"])
def port(request, serve, service, gate) -> Iterator[int]:
    app = create_app(services(service), body_limit=BODY_LIMIT)
    with serve(app, loop=request.param, take_turn=gate.take_turn) as port:
        yield port


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=WAIT)


def post(model: str, pad: int = 0) -> bytes:
    body = json.dumps({"model": model, "prompt": "x" * (pad + 1)}).encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def read_until(line: socket.socket, end: bytes) -> bytes:
    data = b""
    while not data.endswith(end):
        piece = line.recv(65536)
        assert piece, data
        data += piece
    return data


def read_response(line: socket.socket) -> bytes:
    data = b""
    while not (found := re.search(rb"content-length: (\d+).*?\r\n\r\n(.*)", data, re.DOTALL)) or len(found[2]) < int(
        found[1]
    ):
        piece = line.recv(65536)
        assert piece, data
        data += piece
    return data


def test_nothing_of_a_request_runs_before_its_turn(port, service, gate):
    with connect(port) as line:
        line.sendall(post("m"))
        gate.wait_for(1)
        assert service.requests == []
        gate.open()
        assert read_response(line).startswith(b"HTTP/1.1 200")


def test_pieces_that_come_meanwhile_are_parsed_with_the_first(port, service, gate):
    """Of one connection only one turn is asked for. It stops reading when much has come, and goes on with its turn."""
    request = post("m", pad=700_000)
    with connect(port) as line:
        line.sendall(request[:30])
        gate.wait_for(1)
        sender = threading.Thread(target=line.sendall, args=(request[30:],))
        sender.start()
        time.sleep(0.1)  # what comes by now waits too; a part of it is enough
        assert len(gate.held) == 1
        while sender.is_alive():
            until(lambda: gate.held or not sender.is_alive())
            gate.open()
        until(lambda: gate.open() or service.requests)
        assert read_response(line).startswith(b"HTTP/1.1 200")
    assert len(service.requests[0].prompts[0].text) == 700_001


def test_requests_are_parsed_in_order_of_arrival(port, service, gate):
    lines = [connect(port) for _ in range(5)]
    for number, line in enumerate(lines):
        line.sendall(post(f"m{number}"))
        gate.wait_for(number + 1)
    gate.open()
    for line in lines:
        assert read_response(line).startswith(b"HTTP/1.1 200")
        line.close()
    assert [request.model for request in service.requests] == [f"m{number}" for number in range(5)]


def test_a_client_that_leaves_before_its_turn_is_not_served(port, service, gate):
    with connect(port) as line:
        line.sendall(post("left"))
        gate.wait_for(1)
    with connect(port) as line:
        line.sendall(post("stayed"))
        gate.wait_for(2)
        gate.open()
        assert read_response(line).startswith(b"HTTP/1.1 200")
    assert [request.model for request in service.requests] == ["stayed"]


@pytest.mark.parametrize("completes", [True, False])
def test_a_request_that_has_ended_is_freed_without_the_garbage_collector(serve, completes):
    """All of a request in one circle of references would be garbage, and to find it stops the event loop."""
    left: list[weakref.ref[object]] = []

    async def app(scope, receive, send) -> None:
        left.append(weakref.ref(scope[DIRECT_WRITER]._cycle))
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        if completes:
            await send({"type": "http.response.body", "body": b"ok"})
        else:
            assert (await receive())["type"] == "http.disconnect"

    gc.collect()
    gc.disable()
    try:
        with serve(app) as port:
            with connect(port) as line:
                for _ in range(3 if completes else 1):
                    line.sendall(post("m"))
                    assert read_until(line, b"ok" if completes else b"\r\n\r\n").startswith(b"HTTP/1.1 200")
                until(lambda: all(each() is None for each in left[:-1]))  # the connection holds the last one
            until(lambda: left[-1]() is None)
        assert len(left) == (3 if completes else 1)
    finally:
        gc.enable()
