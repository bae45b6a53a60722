"""Deltas that are delivered to a stream's sink reach the client as those do that the iteration yields."""

from __future__ import annotations

import json
import socket

import httpx
import pytest

from millstream.api.http1.direct import CycleWriter
from millstream.types import Delta, FinishReason

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
ROUTES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "x", "stream": True},
    "/v1/messages": CHAT | {"max_tokens": 9},
    "/v1/responses": {"model": "m", "input": "hi", "stream": True, "store": False},
    "/api/chat": CHAT | {"model": "org/tiny"},
}
WORDS = ("one", " two", ' "three"\n', " four é🙂", " " + "long" * 2000)
VARYING = {
    "id",
    "item_id",
    "completed_at",
    "created",
    "created_at",
    "total_duration",
    "load_duration",
    "prompt_eval_duration",
    "eval_duration",
}


def without_varying(value: object) -> object:
    if isinstance(value, dict):
        return {key: without_varying(each) for key, each in value.items() if key not in VARYING}
    return [without_varying(each) for each in value] if isinstance(value, list) else value


def events(raw: bytes) -> list[object]:
    lines = [line.removeprefix("data: ") for line in raw.decode().split("\n")]
    return [without_varying(json.loads(line)) if line.startswith("{") else line for line in lines]


def streamed(http: httpx.Client, service, route: str, *, direct: bool) -> list[object]:
    service.steps, service.ends = [[Delta(0, "zero")]], False
    with http.stream("POST", route, json=ROUTES[route]) as response:
        generation = service.generation()
        assert generation.waiting.wait(20)
        for word in WORDS:
            if direct:
                assert generation.deliver([Delta(0, word)])
            else:
                generation.push([Delta(0, word)])
        generation.push([Delta(0, " end", finish_reason=FinishReason.STOP)])
        generation.push(None)
        return events(response.read())


@pytest.mark.parametrize("route", ROUTES)
def test_the_client_sees_no_difference(http, service, route):
    iterated = streamed(http, service, route, direct=False)
    direct = streamed(http, service, route, direct=True)
    text = json.dumps(direct)
    assert all(json.dumps(word)[1:-1] in text for word in ("one", " four é🙂"))
    # Tokens that wait together may share an event, and these did not.
    assert [each for each in direct if each] == [each for each in iterated if each]


def test_the_connection_serves_the_next_request(http, service):
    """The chunks are well framed, and the response ends."""
    for _ in range(2):
        assert streamed(http, service, "/v1/completions", direct=True)
    service.steps, service.ends = ((Delta(0, "plain", finish_reason=FinishReason.STOP),),), True
    assert http.post("/v1/completions", json={"prompt": "x"}).json()["choices"][0]["text"] == "plain"


def test_a_client_that_does_not_read_is_not_ready(port, service):
    """What is delivered then would be held in memory without a limit: the iteration waits instead."""
    service.steps, service.ends = [[Delta(0, "zero")]], False
    body = json.dumps(ROUTES["/v1/completions"]).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(head % len(body) + body)
        generation = service.generation()
        assert generation.waiting.wait(20)
        delivered = 0
        while generation.deliver([Delta(0, "x" * 50_000)]):
            delivered += 1
            assert delivered < 2000
        assert delivered > 0
    assert generation.cancelled.wait(20)
    assert not generation.deliver([Delta(0, "gone")])


class Transport:
    def write(self, data: bytes) -> None:
        self.written = data


class Flow:
    write_paused = False


class Cycle:
    def __init__(self) -> None:
        self.flow, self.transport = Flow(), Transport()
        self.disconnected = self.response_complete = False
        self.chunked_encoding: bool | None = True


@pytest.mark.parametrize("size", [1, 15, 16, 4095, 4096, 70_000])
def test_the_line_before_a_chunk_is_its_length(size: int) -> None:
    cycle = Cycle()
    CycleWriter(cycle).write(b"x" * size)  # type: ignore[arg-type]
    line, data, rest = cycle.transport.written.split(b"\r\n")
    assert (int(line, 16), len(data), rest) == (size, size, b"")


def test_only_a_chunked_response_under_way_is_ready() -> None:
    cycle = Cycle()
    writer = CycleWriter(cycle)  # type: ignore[arg-type]
    assert writer.ready()
    for name, value in (("chunked_encoding", None), ("disconnected", True), ("response_complete", True)):
        cycle = Cycle()
        setattr(cycle, name, value)
        assert not CycleWriter(cycle).ready()  # type: ignore[arg-type]
