"""Hostile HTTP requests to a real server: each gets the right status, and other clients are served meanwhile."""

from __future__ import annotations

import logging
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from millstream.config import Settings
from support.hostile_requests import HEALTH, REQUESTS, Hostile
from support.server import RunningServer, running

WAIT = 60
QUICK = 5.0
"""Seconds. The goal is 0.1, but test machines are shared."""


@pytest.fixture(scope="module")
def server(servable: Path) -> Iterator[RunningServer]:
    with running(Settings((str(servable),), port=0)) as subject:
        yield subject


def connect(server: RunningServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=WAIT)


def send(line: socket.socket, raw: bytes) -> None:
    """Sends all bytes, or as many as the server accepts."""
    try:
        line.sendall(raw)
    except (BrokenPipeError, ConnectionResetError):
        return


def read_answers(line: socket.socket, count: int) -> list[int]:
    """Returns status codes, once `count` have arrived and the body has ended, or when the server closes."""
    text = b""
    try:
        while data := line.recv(65536):
            text += data
            if len(re.findall(rb"HTTP/1.1 \d+", text)) >= count and text.endswith((b"}", b"\r\n\r\n")):
                break
    except ConnectionResetError:
        pass
    return [int(status) for status in re.findall(rb"HTTP/1.1 (\d+)", text)]


@pytest.mark.parametrize("hostile", REQUESTS, ids=[hostile.name for hostile in REQUESTS])
def test_a_hostile_request_gets_its_status(
    server: RunningServer, hostile: Hostile, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(server) as line:
        send(line, hostile.raw)
        assert read_answers(line, len(hostile.status)) == list(hostile.status)
    with connect(server) as line:
        line.sendall(HEALTH)
        assert read_answers(line, 1) == [200]
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_giant_header_does_not_block_other_clients(server: RunningServer) -> None:
    """It used to be parsed completely, for 10 s and more, before the API key was checked."""
    ended = threading.Event()

    def attack() -> None:
        with connect(server) as line:
            send(line, b"GET /health HTTP/1.1\r\nhost: localhost\r\na: ")
            for _ in range(1000):
                send(line, b"x" * 100_000)
        ended.set()

    attacker = threading.Thread(target=attack)
    slowest = 0.0
    with httpx.Client(base_url=server.url, timeout=WAIT) as http:
        http.get("/health")
        attacker.start()
        for _ in range(2000):
            began = time.monotonic()
            assert http.get("/health").status_code == 200
            slowest = max(slowest, time.monotonic() - began)
            if ended.is_set():
                break
    attacker.join(WAIT)
    assert ended.is_set() and slowest < QUICK


def test_forty_clients_that_pipeline_and_disconnect_hold_no_rows(server: RunningServer) -> None:
    body = b'{"prompt":"hello","max_tokens":400,"ignore_eos":true,"stream":true}'
    ask = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    for _ in range(40):
        line = connect(server)
        line.sendall(ask + ask)
        if len(line.recv(100)) == 0:
            pytest.fail("not served")
        line.close()
    with httpx.Client(base_url=server.url, timeout=WAIT) as http:
        pause = threading.Event()
        for _ in range(1000):
            card = http.get("/v1/models").json()["data"][0]
            if card["active"] + card["waiting"] == 0:
                break
            pause.wait(0.01)
        assert card["active"] + card["waiting"] == 0
        done = http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 3, "ignore_eos": True})
    assert done.status_code == 200
