"""A disconnect cancels the generation, at whatever point it happens."""

from __future__ import annotations

import asyncio
import json
import logging
import socket

import httpx
import openai
import pytest

from millstream.api.app import create_app
from millstream.api.disconnect import ClientLeft, WhileConnected
from millstream.types import Delta
from support.services import services

WAIT = 60


@pytest.fixture(params=["ours-uvloop", "ours-asyncio", "httptools-uvloop", "h11-asyncio"])
def line(request, serve, service):
    """A bare socket to a server, with our HTTP protocol and with both of uvicorn's."""
    protocol, loop = request.param.split("-")
    options = {"loop": loop} if protocol == "ours" else {"loop": loop, "http": protocol}
    with serve(create_app(services(service), body_limit=10**6), **options) as port:
        connection = socket.create_connection(("127.0.0.1", port), timeout=WAIT)
        yield connection
        connection.close()


def ask(line, *, stream, route="chat/completions", content="hi"):
    body = json.dumps({"messages": [{"role": "user", "content": content}], "stream": stream}).encode()
    head = f"POST /v1/{route} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    line.sendall(head.encode() + body)


@pytest.mark.parametrize("stream", [False, True])
def test_during_prefill(line, service, stream):
    """There is no token yet, so no write can fail."""
    service.steps, service.ends = [], False
    ask(line, stream=stream)
    generation = service.generation()
    assert generation.waiting.wait(WAIT) and not generation.cancelled.is_set()
    line.close()
    assert generation.cancelled.wait(WAIT) and generation.left_early


@pytest.mark.parametrize("stream", [False, True])
def test_after_a_large_body(line, service, stream):
    """The server pauses reading while such a body waits for the application."""
    service.steps, service.ends = [], False
    ask(line, stream=stream, content="x" * 400_000)
    generation = service.generation()
    assert generation.waiting.wait(WAIT)
    line.close()
    assert generation.cancelled.wait(WAIT) and generation.left_early


@pytest.mark.parametrize("stream", [False, True])
def test_before_admission(line, service, stream):
    service.hold_start = True
    ask(line, stream=stream)
    assert service.start_entered.wait(WAIT)
    line.close()
    assert service.start_cancelled.wait(WAIT)


@pytest.mark.parametrize("stream", [False, True])
def test_while_tokens_flow(line, service, stream, caplog):
    service.ends = False
    ask(line, stream=stream)
    generation = service.generation()
    assert generation.waiting.wait(WAIT)
    line.close()
    assert generation.cancelled.wait(WAIT) and generation.left_early
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_while_the_client_does_not_read(line, service):
    """The socket buffer is full and the server waits to write. A reset must still be noticed."""
    service.ends = False
    service.steps = [(Delta(0, "x" * 1_000_000),)] * 30
    ask(line, stream=True)
    generation = service.generation()
    assert line.recv(1000).startswith(b"HTTP/1.1 200")
    line.close()
    assert generation.cancelled.wait(WAIT) and generation.left_early


def test_with_the_official_client(client, service):
    service.ends = False
    with client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}], stream=True) as chunks:
        next(iter(chunks))
        generation = service.generation()
        assert not generation.cancelled.is_set()
    assert generation.cancelled.wait(WAIT) and generation.left_early


def test_with_an_abandoned_task_of_the_async_client(port, service):
    service.steps, service.ends = [], False

    async def abandon():
        url = f"http://127.0.0.1:{port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0) as client:
            task = asyncio.create_task(client.completions.create(model="m", prompt="x"))
            generation = await asyncio.to_thread(service.generation)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return generation

    generation = asyncio.run(abandon())
    assert generation.cancelled.wait(WAIT) and generation.left_early


def test_a_complete_response_is_no_disconnect(http, service):
    for stream in (False, True, False):
        body = {"prompt": "x", "stream": stream}
        assert http.post("/v1/completions", json=body).status_code == 200
        assert service.generation().left_early is False


def test_many_disconnect_while_others_stay(port, service):
    service.steps, service.ends = [], False

    async def main():
        limits = httpx.Limits(max_connections=60)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", limits=limits, timeout=WAIT) as client:
            tasks = [
                asyncio.create_task(
                    client.post("/v1/completions", json={"model": f"{n}", "prompt": "x", "stream": n % 4 < 2})
                )
                for n in range(40)
            ]
            generations = {int(g.model): g for g in [await asyncio.to_thread(service.generation) for _ in tasks]}
            for n in range(0, 40, 2):
                tasks[n].cancel()
            for n in range(0, 40, 2):
                assert await asyncio.to_thread(generations[n].cancelled.wait, WAIT)
            for n in range(1, 40, 2):
                assert not generations[n].cancelled.is_set()
                generations[n].push([Delta(0, "done")])
                generations[n].push(None)
            responses = await asyncio.gather(*tasks[1::2])
            await asyncio.gather(*tasks, return_exceptions=True)
            return generations, responses

    generations, responses = asyncio.run(main())
    assert all(response.status_code == 200 and "done" in response.text for response in responses)
    assert [generations[n].left_early for n in range(40)] == [n % 2 == 0 for n in range(40)]


def test_other_cancellations_pass_through():
    async def receive():
        await asyncio.Event().wait()

    async def block():
        async with WhileConnected(receive):
            await asyncio.Event().wait()

    async def main():
        task = asyncio.create_task(block())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_a_disconnect_differs_from_a_cancellation_and_leaves_the_task_uncancelled():
    async def receive():
        return {"type": "http.disconnect"}

    async def main():
        with pytest.raises(ClientLeft):
            async with WhileConnected(receive):
                await asyncio.Event().wait()
        assert asyncio.current_task().cancelling() == 0
        await asyncio.sleep(0)

    asyncio.run(main())
