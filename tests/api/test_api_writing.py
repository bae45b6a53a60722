"""Writes to clients that read little or nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millstream.api.openai.render_chat import ChatRenderer
from millstream.api.response import GenerationResponse, StreamedResponse
from millstream.api.sse import EVENT_STREAM
from millstream.api.stream import Stream
from millstream.api.writer import PIECE, ClientStalled, Writer
from millstream.types import ChatPrompt, Delta, FinishReason, GenerationRequest

REQUEST = GenerationRequest("m", (ChatPrompt(()),))
SOON = 0.2
"""A busy machine may take a while for a write that succeeds."""


class Client:
    """Accepts `limit` messages and then none. `pause`: seconds before it accepts one."""

    def __init__(self, limit: int, pause: float = 0) -> None:
        self.sent: list[dict[str, Any]] = []
        self._limit = limit
        self._pause = pause

    async def send(self, message: Any) -> None:
        if len(self.sent) == self._limit:
            await asyncio.Event().wait()
        await asyncio.sleep(self._pause)
        self.sent.append(message)

    async def receive(self) -> Any:
        await asyncio.Event().wait()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


def renderer(model: str) -> ChatRenderer:
    return ChatRenderer(model, include_usage=False, logprobs=False)


@pytest.mark.parametrize("size", [0, 1, PIECE, PIECE + 1, 3 * PIECE, 5 * PIECE + 7])
def test_a_large_body_is_written_in_pieces(size: int) -> None:
    client, data = Client(100), bytes(index % 251 for index in range(size))

    async def main() -> None:
        async with Writer(client.send, 60) as writer:
            await writer.body(data, more=False)

    asyncio.run(main())
    assert client.body == data
    assert all(len(message["body"]) <= PIECE for message in client.sent)
    assert [message["more_body"] for message in client.sent] == [True] * (len(client.sent) - 1) + [False]
    assert len(client.sent) == max(1, -(-size // PIECE))


def test_a_slow_client_that_makes_progress_is_waited_for() -> None:
    """It needs longer than the timeout in total, but never for one piece."""
    client = Client(100, pause=SOON / 16)

    async def main() -> None:
        async with Writer(client.send, SOON) as writer:
            await writer.body(bytes(20 * PIECE), more=False)

    asyncio.run(main())
    assert len(client.body) == 20 * PIECE


@pytest.mark.parametrize("limit", [1, 2])
def test_a_stream_that_is_not_read_is_cancelled(service, limit: int) -> None:
    service.steps, service.ends = [(Delta(0, "a"),), (Delta(0, "b"),)], False
    client = Client(limit)
    response = StreamedResponse(service, REQUEST, renderer, ping_seconds=15, write_timeout=SOON)
    with pytest.raises(ClientStalled):
        asyncio.run(response({"type": "http"}, client.receive, client.send))
    generation = service.generation()
    assert generation.outcome == "stalled"
    assert len(client.sent) == limit


def test_the_end_of_a_stream_has_a_timeout(service) -> None:
    client = Client(3)
    response = StreamedResponse(service, REQUEST, renderer, ping_seconds=15, write_timeout=SOON)
    with pytest.raises(ClientStalled):
        asyncio.run(response({"type": "http"}, client.receive, client.send))


def test_a_whole_response_has_a_timeout(service) -> None:
    service.steps = [(Delta(0, "x" * 10 * PIECE, finish_reason=FinishReason.STOP),)]
    client = Client(4)
    with pytest.raises(ClientStalled):
        asyncio.run(
            GenerationResponse(service, REQUEST, renderer, write_timeout=SOON)(
                {"type": "http"}, client.receive, client.send
            )
        )
    assert service.generation().cancelled.is_set()
    assert len(client.sent) == 4


def test_a_ping_that_is_not_read_ends_the_stream() -> None:
    client = Client(1)

    async def main() -> None:
        async with Writer(client.send, SOON) as writer, Stream(writer, EVENT_STREAM, ping_seconds=0.001):
            await asyncio.Event().wait()

    with pytest.raises(ClientStalled):
        asyncio.run(main())


def test_a_silent_model_is_no_stall() -> None:
    async def main() -> None:
        async with Writer(Client(100).send, SOON) as writer:
            await writer.start([])
            await asyncio.sleep(3 * SOON)
            await writer.body(b"now", more=False)

    asyncio.run(main())


def test_without_a_timeout_it_waits(service) -> None:
    client = Client(1)

    async def main() -> None:
        async with asyncio.timeout(3 * SOON), Writer(client.send, 0) as writer:
            await writer.start([])
            await writer.body(b"", more=False)

    with pytest.raises(TimeoutError):
        asyncio.run(main())
