"""The event loop never waits for a model: while the backend is blocked in `step`, the server still responds."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from millstream.config import Settings
from millstream.loading.backends import generation_backend
from millstream.models.source import ModelSource
from millstream.server import MillServer
from support.fake import Gate
from support.server import RunningServer, running
from support.wrapped import Gated

ROWS = 2
QUEUE = 1


class HeldServer:
    def __init__(self, server: RunningServer, gate: Gate, backends: list[Gated]) -> None:
        self.server = server
        self.gate = gate
        self.backends = backends
        self.http = httpx.Client(base_url=server.url, timeout=30)

    def admission(self) -> tuple[int, int]:
        def counts(server: MillServer) -> tuple[int, int]:
            [entry] = server.mill.hub._models.values()
            assert entry.model is not None
            return entry.model.engine.admission.active, entry.model.engine.admission.waiting

        return tuple(self.server.call(counts))  # type: ignore[return-value]

    def wait_admitted(self, active: int, waiting: int = 0) -> None:
        pause = threading.Event()
        for _ in range(3000):
            if self.admission() == (active, waiting):
                return
            pause.wait(0.01)
        pytest.fail(f"{self.admission()} admitted, not {(active, waiting)}")


@pytest.fixture
def held(servable: Path) -> Iterator[HeldServer]:
    gate = Gate()
    backends: list[Gated] = []

    def make(source: ModelSource, settings: Settings) -> Gated:
        backends.append(Gated(generation_backend(source, settings), gate))
        return backends[0]

    settings = Settings((str(servable),), port=0, max_batch=ROWS, queue=QUEUE, grace=0.0)
    with running(settings, make) as server:
        subject = HeldServer(server, gate, backends)
        yield subject
        gate.open()
        subject.http.close()


def body(**changes: Any) -> dict[str, Any]:
    return {"prompt": "hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True, **changes}


def open_stream(held: HeldServer, **changes: Any) -> httpx.Response:
    """Returns a stream whose headers have arrived. The caller closes it."""
    request = held.http.build_request("POST", "/v1/completions", json=body(stream=True, **changes))
    return held.http.send(request, stream=True)


def test_health_and_rejections_are_served_while_a_step_hangs(held: HeldServer) -> None:
    streams = [open_stream(held) for _ in range(ROWS + QUEUE)]
    held.gate.wait_entered()
    assert held.http.get("/health").json()["status"] == "ok"
    assert held.http.get("/v1/models").status_code == 200
    assert b"millstream_active_requests" in held.http.get("/metrics").content
    refused = held.http.post("/v1/completions", json=body())
    assert refused.status_code == 503
    error = refused.json()["error"]
    assert (error["code"], error["active"], error["waiting"]) == ("engine_busy", ROWS, QUEUE)
    assert int(refused.headers["retry-after"]) >= 1
    held.gate.open()
    for stream in streams:
        assert stream.read().endswith(b"data: [DONE]\n\n")
        stream.close()
    assert held.http.post("/v1/completions", json=body()).status_code == 200


def test_a_request_that_can_never_be_admitted_is_a_400(held: HeldServer) -> None:
    refused = held.http.post("/v1/completions", json=body(n=ROWS + QUEUE + 1))
    assert refused.status_code == 400
    assert "at most 3" in refused.json()["error"]["message"]


def test_a_disconnect_frees_the_row_and_does_not_affect_others(held: HeldServer) -> None:
    held.gate.open()
    alone = held.http.post("/v1/completions", json=body(max_tokens=30)).json()["choices"][0]["text"]
    held.gate._open.clear()
    with ThreadPoolExecutor(1) as pool:
        staying = pool.submit(held.http.post, "/v1/completions", json=body(max_tokens=30))
        held.wait_admitted(1)
        leaving = open_stream(held, max_tokens=400)
        held.wait_admitted(2)
        for _ in range(4):
            held.gate.let_one()
        leaving.close()
        held.gate.open()
        assert staying.result(30).json()["choices"][0]["text"] == alone
    held.wait_admitted(0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_during_a_step_frees_the_slot_when_the_step_ends(held: HeldServer, stream: bool) -> None:
    """The row may still be in the batch while the step runs, so its slot is not reused before the step ends."""
    with socket.create_connection(("127.0.0.1", held.server.port)) as client:
        content = json.dumps(body(stream=stream, max_tokens=400)).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n\r\n"
        client.sendall(head.encode() + content)
        held.gate.wait_entered()
    assert held.admission() == (1, 0)
    held.gate.open()
    held.wait_admitted(0)


def test_an_exception_in_a_step_is_a_500_and_an_error_event(held: HeldServer) -> None:
    stream = open_stream(held)
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(held.http.post, "/v1/completions", json=body())
        held.wait_admitted(2)
        held.gate.wait_entered()
        held.gate.let_one()
        held.gate.wait_entered()
        held.gate.let_one()
        held.gate.wait_entered()
        held.backends[0].fail_next = RuntimeError("the device is on fire")
        held.gate.let_one()
        reply = whole.result(30)
    assert reply.status_code == 500
    assert reply.json()["error"]["code"] == "engine_error"
    assert "on fire" in reply.json()["error"]["message"]
    last = [line for line in stream.read().decode().splitlines() if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_error"
    stream.close()
    held.gate.open()
    assert held.http.post("/v1/completions", json=body()).status_code == 200, "the engine keeps serving"


def test_shutdown_begins_while_a_step_hangs(held: HeldServer) -> None:
    """A stream that outlasts the grace period gets an error event. The engine frees its model when the step ends."""
    stream = open_stream(held, max_tokens=400)
    held.gate.wait_entered()
    held.server.stop_soon()
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(stream.iter_lines()))
    reader.start()
    pause = threading.Event()
    while held.server.call(lambda server: server.mill.hub._closing) is None:
        pause.wait(0.01)
    held.gate.open()
    reader.join(30)
    assert held.server.join() == (0, True)
    last = [line for line in lines if line][-1]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["code"], error["message"]) == ("engine_unavailable", "the server is shutting down")
    stream.close()
