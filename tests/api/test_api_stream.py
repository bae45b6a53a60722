"""The bytes of a stream: events, headers, pings, and the number of writes."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from millstream.api.app import create_app
from millstream.api.openai.render_chat import ChatRenderer
from millstream.api.openai.render_completion import CompletionRenderer
from millstream.api.response import StreamedResponse
from millstream.types import ChatPrompt, Delta, FinishReason, GenerationRequest, TextLogprob, Usage
from support.services import services

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
AWKWARD = '"\\ \n\r\u2028 data: [DONE]\n\n é 🙂 \x00 </script>'


def frames(raw: bytes) -> list[dict]:
    return [json.loads(frame.removeprefix(b"data: ")) for frame in raw.split(b"\n\n") if frame.startswith(b"data: {")]


def test_frames_and_headers(http):
    response = http.post("/v1/chat/completions", json=CHAT)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache" and response.headers["x-accel-buffering"] == "no"
    lines = response.content.split(b"\n\n")
    assert all(line.startswith(b"data: ") for line in lines[:-1])
    assert lines[-2:] == [b"data: [DONE]", b""]


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_any_text_survives(http, service, route):
    service.steps = [(Delta(0, AWKWARD, finish_reason=FinishReason.STOP),)]
    body = {"stream": True} | ({"prompt": "x"} if route == "completions" else CHAT)
    raw = http.post(f"/v1/{route}", json=body).content
    choices = [frame["choices"][0] for frame in frames(raw)]
    assert "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices) == AWKWARD
    assert raw.count(b"data: [DONE]\n\n") == 1


def test_headers_are_sent_before_the_first_token(http, service):
    service.steps, service.ends = [], False
    with http.stream("POST", "/v1/chat/completions", json=CHAT) as response:
        assert response.status_code == 200
        generation = service.generation()
        assert not generation.cancelled.is_set()
        generation.push([Delta(0, "now")])
        generation.push(None)
        assert b"now" in response.read()


def test_each_step_is_sent_at_once(http, service):
    service.steps, service.ends = [], False
    with http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as response:
        generation, arriving = service.generation(), response.iter_raw()
        for word in ("one", "two", "three"):
            generation.push([Delta(0, word)])
            assert frames(next(arriving))[0]["choices"][0]["text"] == word
        generation.push(None)
        assert b"".join(arriving) == b"data: [DONE]\n\n"


def test_pings_while_no_token_flows(serve, service):
    service.steps, service.ends = [], False
    with (
        serve(create_app(services(service), body_limit=1000, ping_seconds=0.01)) as port,
        httpx.Client(timeout=60) as http,
        http.stream("POST", f"http://127.0.0.1:{port}/v1/chat/completions", json=CHAT) as response,
    ):
        generation, arriving = service.generation(), response.iter_raw()
        assert next(arriving).startswith(b": ping\n\n")
        assert next(arriving).startswith(b": ping\n\n")
        generation.push([Delta(0, "now")])
        generation.push(None)
        rest = b"".join(arriving)
        assert b"now" in rest and rest.endswith(b"data: [DONE]\n\n")


def sent_by(service, renderer) -> list[bytes]:
    """Every body message of a response, without a server in between."""

    async def main():
        sent = []

        async def receive():
            await asyncio.Event().wait()

        async def send(message):
            sent.append(message)

        request = GenerationRequest("m", (ChatPrompt(()),))
        response = StreamedResponse(service, request, renderer, ping_seconds=15, write_timeout=60)
        await response({"type": "http"}, receive, send)
        assert sent[0]["type"] == "http.response.start" and sent[0]["status"] == 200
        assert [message["more_body"] for message in sent[1:]] == [True] * (len(sent) - 2) + [False]
        return [message["body"] for message in sent[1:]]

    return asyncio.run(main())


def test_one_send_per_batch_and_one_chunk_per_choice(service):
    service.steps = [
        (Delta(0, "a"), Delta(1, "x"), Delta(0, "b")),
        (Delta(0, ""),),
        (Delta(1, "y"), Delta(1, finish_reason=FinishReason.LENGTH), Delta(0, "c", finish_reason=FinishReason.STOP)),
    ]
    bodies = sent_by(service, lambda model: ChatRenderer(model, include_usage=False, logprobs=False))
    assert len(bodies) == 3 and bodies[-1] == b"data: [DONE]\n\n"
    first, second = ([frame["choices"][0] for frame in frames(body)] for body in bodies[:2])
    assert [(c["index"], c["delta"]) for c in first] == [
        (0, {"role": "assistant", "content": ""}),
        (0, {"content": "ab"}),
        (1, {"role": "assistant", "content": ""}),
        (1, {"content": "x"}),
    ]
    assert [(c["index"], c["delta"], c["finish_reason"]) for c in second] == [
        (0, {"content": "c"}, None),
        (0, {}, "stop"),
        (1, {"content": "y"}, None),
        (1, {}, "length"),
    ]


def test_logprobs_are_sent_only_if_requested():
    piece = TextLogprob("a", b"a", -0.1)
    batch = [Delta(0, "a", (piece,))]
    chat = ChatRenderer("m", include_usage=False, logprobs=False)
    text = CompletionRenderer("m", include_usage=False, logprobs=None)
    for raw in (chat.chunks(batch), text.chunks(batch)):
        assert [frame["choices"][0]["logprobs"] for frame in frames(raw)] == [None] * raw.count(b"data:")
    for raw in (chat.whole(batch, Usage()), text.whole(batch, Usage())):
        assert json.loads(raw)["choices"][0]["logprobs"] is None
