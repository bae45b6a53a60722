"""Pipelined requests: they are served in order, limited in number, and do not hide a disconnect."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator

import pytest

from millstream.api.app import create_app
from millstream.api.http1.limits import HttpLimits
from millstream.types import Delta
from support.services import services

WAIT = 60


@pytest.fixture(params=["uvloop", "asyncio"])
def port(request, serve, service) -> Iterator[int]:
    with serve(create_app(services(service), body_limit=10**6), loop=request.param) as port:
        yield port


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=WAIT)


def post(model: str, *, stream: bool = False, pad: int = 0) -> bytes:
    body = json.dumps({"model": model, "prompt": "x" * (pad + 1), "stream": stream}).encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


def read_until(line: socket.socket, pattern: bytes) -> bytes:
    text = b""
    while not re.search(pattern, text, re.DOTALL):
        data = line.recv(65536)
        assert data, text
        text += data
    return text


def read_all(line: socket.socket) -> bytes:
    text = b""
    while data := line.recv(65536):
        text += data
    return text


@pytest.mark.parametrize("second", [GET, post("second"), post("second")[:-5], post("second", pad=40_000), GET[:20]])
@pytest.mark.parametrize("together", [True, False])
def test_a_second_request_does_not_hide_a_disconnect(port, service, second, together):
    service.ends = False
    lines, generations = [], []
    for _ in range(10):
        line = connect(port)
        line.sendall(post("first", stream=True) + (second if together else b""))
        generations.append(service.generation())
        assert generations[-1].waiting.wait(WAIT)
        if not together:
            line.sendall(second)
        lines.append(line)
    for line in lines:
        line.close()
    for generation in generations:
        assert generation.cancelled.wait(WAIT) and generation.left_early
    assert [request.model for request in service.requests] == ["first"] * 10, "the second request does not start"


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("pad", [0, 60_000])
def test_responses_come_in_order(port, service, together, pad):
    service.steps, service.ends = [], False
    with connect(port) as line:
        requests = [post("first", pad=pad), GET, post("second", pad=pad), post("third")]
        if pad:
            requests.insert(1, GET)
        first, rest = (requests[:1], requests[1:]) if not together else (requests, [])
        line.sendall(b"".join(first))
        generation = service.generation()
        line.sendall(b"".join(rest))
        responses = b""
        for name in ("first", "second", "third"):
            assert generation.model == name
            generation.push([Delta(0, f"text of {name}")])
            generation.push(None)
            responses += read_until(line, f"text of {name}.*}}}}".encode())
            generation = service.generation() if name != "third" else generation
    found = re.findall(rb"text of \w+|millstream_up|\"status\"", responses)
    health = [b'"status"'] * (2 if pad else 1)
    assert found == [b"text of first", *health, b"text of second", b"text of third"]
    assert responses.count(b"HTTP/1.1 200") == len(found)


def test_too_many_pipelined_requests_are_refused_after_the_responses(port, service):
    service.steps, service.ends = [], False
    with connect(port) as line:
        line.sendall(post("first") + GET * 40)
        generation = service.generation()
        generation.push(None)
        responses = read_all(line)
    statuses = re.findall(rb"HTTP/1.1 (\d+)", responses)
    assert statuses == [b"200"] * (1 + HttpLimits().pipelined) + [b"400"]
    assert b"sent ahead of their responses" in responses


def test_too_many_pipelined_bytes_close_the_connection(port, service):
    service.steps, service.ends = [], False
    with connect(port) as line:
        line.sendall(post("first"))
        generation = service.generation()
        line.sendall(b"x" * 2**20)
        assert generation.cancelled.wait(WAIT) and generation.left_early


def test_invalid_bytes_are_refused_after_the_response(port, service):
    service.steps, service.ends = [], False
    with connect(port) as line:
        line.sendall(post("first") + b"\x01\x02 nonsense\r\n\r\n")
        generation = service.generation()
        generation.push([Delta(0, "the response")])
        generation.push(None)
        responses = read_all(line)
    assert re.findall(rb"HTTP/1.1 (\d+)", responses) == [b"200", b"400"]
    assert b"the response" in responses
    assert not generation.left_early


def test_a_response_before_the_body_keeps_the_connection(port):
    """The rest of the body is dropped, and the next request is served."""
    with connect(port) as line:
        line.sendall(b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\ncontent-length: 200000\r\n\r\n" + b"x" * 1000)
        assert read_until(line, rb"}}").startswith(b"HTTP/1.1 404")
        line.sendall(b"x" * 199_000 + GET)
        assert read_until(line, rb"}}").startswith(b"HTTP/1.1 200")
