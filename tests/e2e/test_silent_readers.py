"""Clients that do not read their responses: rows are freed, memory stays bounded, other clients are unaffected."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from millstream.config import Settings
from support.server import RunningServer, running
from support.tiers import some
from support.tiny import write_servable

CONTEXT = 4096
BUFFER = 8 * 1024
"""Size of the socket buffers: the server can send a little more than this if the client does not read."""
LARGE = {"prompt": "hello", "temperature": 0, "ignore_eos": True, "stream": True, "max_tokens": 3000, "logprobs": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_servable(tmp_path_factory.mktemp("long") / "tiny", max_position_embeddings=CONTEXT)


@contextmanager
def serving(folder: Path, **settings: Any) -> Iterator[tuple[RunningServer, httpx.Client]]:
    with (
        running(Settings((str(folder),), port=0, grace=0.0, device="cpu", **settings)) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        server._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        yield server, http


def ask(server: RunningServer, body: dict[str, Any]) -> socket.socket:
    """Sends a request without reading the response."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
    client.connect(("127.0.0.1", server.port))
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(data)}\r\n\r\n"
    client.sendall(head.encode() + data)
    client.settimeout(60)
    return client


def read_rest(client: socket.socket) -> bytes:
    """Reads until the server closes or the stream ends."""
    found = bytearray()
    while not found.endswith(b"0\r\n\r\n"):
        piece = client.recv(2**16)
        if not piece:
            break
        found += piece
    return bytes(found)


def events(raw: bytes) -> list[Any]:
    """Returns the events of a chunked stream."""
    _, _, raw = raw.partition(b"\r\n\r\n")
    body = bytearray()
    while raw:
        size, _, raw = raw.partition(b"\r\n")
        body += raw[: int(size, 16)]
        raw = raw[int(size, 16) + 2 :]
    lines = bytes(body).split(b"\n\n")
    return [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")] + [
        line for line in lines if line == b"data: [DONE]"
    ]


def text_of(found: list[Any]) -> str:
    return "".join(event["choices"][0]["text"] for event in found if isinstance(event, dict) and event.get("choices"))


def metric(http: httpx.Client, start: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(start))


def ended(http: httpx.Client, outcome: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    return sum(
        float(line.split()[-1])
        for line in lines
        if line.startswith("millstream_requests_total") and f'outcome="{outcome}"' in line
    )


def wait_for(condition: Any, what: str) -> None:
    pause = threading.Event()
    for _ in range(3000):
        if condition():
            return
        pause.wait(0.01)
    pytest.fail(f"never happened: {what}")


def unread(server: RunningServer) -> int:
    found: int = server.call(lambda running: running.mill.services.generation._unread.total)
    return found


@pytest.mark.parametrize("isolation", some(["thread", "process"], ["process"]))
def test_answers_that_nobody_reads_end_and_others_flow(folder: Path, isolation: str) -> None:
    with serving(folder, isolation=isolation, max_batch=4, unread_output=100_000) as (server, http):
        silent = [ask(server, LARGE) for _ in range(3)]
        other = http.post("/v1/completions", json={**LARGE, "max_tokens": 100, "logprobs": None})
        assert other.text.endswith("data: [DONE]\n\n")
        wait_for(lambda: ended(http, "unread") == 3, "three requests ended as unread")
        wait_for(lambda: metric(http, "millstream_active_requests") == 0, "their rows were freed")
        assert unread(server) == 0
        found = events(read_rest(silent[0]))
        assert found[-1]["error"]["code"] == "output_unread"
        assert "Read faster, or ask for fewer" in found[-1]["error"]["message"]
        assert 0 < len(found) < 3000
        for client in silent:
            client.close()
        assert http.post("/v1/completions", json={**LARGE, "max_tokens": 5}).text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("isolation", some(["thread", "process"], ["thread"]))
def test_a_reader_that_is_late_gets_all_of_it(folder: Path, isolation: str) -> None:
    body = {**LARGE, "max_tokens": 400, "speculation": False}  # drafts come in fewer, smaller events
    with serving(folder, isolation=isolation) as (server, http):
        whole = http.post("/v1/completions", json={**body, "stream": False}).json()["choices"][0]
        late = ask(server, body)
        wait_for(
            lambda: metric(http, "millstream_active_requests") == 0 and unread(server) > 0,
            "the whole output is buffered",
        )
        found = events(read_rest(late))
        late.close()
        assert found[-1] == b"data: [DONE]"
        assert text_of(found) == whole["text"]
        # An event may have text or the reason of the end alone.
        parts = [event["choices"][0]["logprobs"] or {} for event in found[:-1]]
        scores = [each for part in parts for each in part.get("token_logprobs", ())]
        assert scores == whole["logprobs"]["token_logprobs"]
        wait_for(lambda: unread(server) == 0 and ended(http, "finished") == 2, "it was read")


def test_a_stalled_write_times_out(folder: Path) -> None:
    with serving(folder, isolation="thread", write_timeout=0.3) as (server, http):
        silent = ask(server, LARGE)
        wait_for(lambda: ended(http, "stalled") == 1, "a request ended as stalled")
        wait_for(lambda: metric(http, "millstream_active_requests") == 0, "its row was freed")
        assert unread(server) == 0
        assert b"[DONE]" not in read_rest(silent)
        silent.close()


def test_an_unread_non_streaming_response_is_dropped(folder: Path) -> None:
    with serving(folder, isolation="thread", write_timeout=0.3) as (server, http):
        silent = ask(server, {**LARGE, "stream": False, "max_tokens": 200, "n": 4})
        wait_for(lambda: ended(http, "finished") == 1, "the answer was complete")
        threading.Event().wait(1)
        head, _, body = read_rest(silent).partition(b"\r\n\r\n")
        silent.close()
        length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
        assert len(body) < int(length.split(b":")[1])
        assert http.get("/health").status_code == 200
