"""/v1/chat/completions as the official client sees it."""

from __future__ import annotations

import asyncio

import openai
import pytest

from millstream import __version__
from millstream.types import ChatPrompt, Delta, FinishReason, Sampling, TextLogprob

ASK = [{"role": "user", "content": "hi"}]
STOP = FinishReason.STOP
USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 5,
    "total_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 3},
    "completion_tokens_details": {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 2,
        "rejected_prediction_tokens": 1,
    },
}


def ask(client, **more):
    return client.chat.completions.create(model="m", messages=ASK, **more)


def test_whole_response(client, service):
    response = ask(client)
    assert response.id.startswith("chatcmpl-") and response.object == "chat.completion" and response.model == "m"
    assert response.system_fingerprint == f"millstream-{__version__}" and response.created > 1_700_000_000
    (choice,) = response.choices
    assert (choice.index, choice.message.role, choice.message.content) == (0, "assistant", "Hello world")
    assert choice.finish_reason == "stop" and choice.logprobs is None
    usage = response.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (7, 5, 12)
    assert service.generation().left_early is False


@pytest.mark.parametrize("reason, shown", [("stop", "stop"), ("length", "length"), ("cancelled", "stop")])
@pytest.mark.parametrize("stream", [False, True])
def test_finish_reasons(client, service, reason, shown, stream):
    service.steps = [(Delta(0, "x", finish_reason=FinishReason(reason)),)]
    response = ask(client, stream=stream)
    last = list(response)[-1] if stream else response
    assert last.choices[0].finish_reason == shown


def test_choices_come_in_the_order_of_their_indices(client, service):
    service.steps = [
        (Delta(1, "b"), Delta(0, "a")),
        (Delta(2, "c", finish_reason=STOP), Delta(1, "B", finish_reason=STOP)),
        (Delta(0, "A", finish_reason=FinishReason.LENGTH),),
    ]
    response = ask(client, n=3)
    assert [(c.index, c.message.content, c.finish_reason) for c in response.choices] == [
        (0, "aA", "length"),
        (1, "bB", "stop"),
        (2, "c", "stop"),
    ]
    assert service.requests[0].n == 3


def test_stream(client):
    chunks = list(ask(client, stream=True))
    assert {chunk.id for chunk in chunks} == {chunks[0].id} and chunks[0].id.startswith("chatcmpl-")
    assert {(c.object, c.model, c.created) for c in chunks} == {("chat.completion.chunk", "m", chunks[0].created)}
    assert [c.choices[0].delta.to_dict() for c in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "Hello"},
        {"content": " world"},
        {},
    ]
    assert [c.choices[0].finish_reason for c in chunks] == [None, None, None, "stop"]
    assert all("usage" not in c.to_dict() for c in chunks)


def test_stream_with_usage(client):
    *chunks, last = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert all(c.to_dict()["usage"] is None and len(c.choices) == 1 for c in chunks)
    assert last.choices == []
    assert last.usage.to_dict() == USAGE


def test_stream_of_several_choices(client, service):
    service.steps = [
        (Delta(0, "a"), Delta(1, "b")),
        (Delta(1, "B", finish_reason=STOP),),
        (Delta(0, "A", finish_reason=STOP),),
    ]
    texts, ends, firsts = {0: "", 1: ""}, {}, {}
    for chunk in ask(client, n=2, stream=True):
        (choice,) = chunk.choices
        assert choice.index not in ends
        firsts.setdefault(choice.index, choice.delta.role)
        texts[choice.index] += choice.delta.content or ""
        if choice.finish_reason:
            ends[choice.index] = choice.finish_reason
    assert (texts, firsts) == ({0: "aA", 1: "bB"}, {0: "assistant", 1: "assistant"})
    assert ends == {0: "stop", 1: "stop"}


def test_async_client_whole_and_streamed(port):
    async def both():
        url = f"http://127.0.0.1:{port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0) as client:
            whole = await ask(client)
            parts = [chunk.choices[0].delta.content or "" async for chunk in await ask(client, stream=True)]
            return whole.choices[0].message.content, "".join(parts)

    assert asyncio.run(both()) == ("Hello world", "Hello world")


LOGPROBS = (
    TextLogprob("é", "é".encode(), -0.5, (("é", "é".encode(), -0.5), ("x", b"x", float("-inf")))),
    TextLogprob("\ufffd", b"\xf0", -1.0, ()),
)
SHOWN = [
    {
        "token": "é",
        "logprob": -0.5,
        "bytes": [195, 169],
        "top_logprobs": [
            {"token": "é", "logprob": -0.5, "bytes": [195, 169]},
            {"token": "x", "logprob": -9999.0, "bytes": [120]},
        ],
    },
    {"token": "\ufffd", "logprob": -1.0, "bytes": [240], "top_logprobs": []},
]


def test_logprobs_whole(client, service):
    service.steps = [(Delta(0, "é", LOGPROBS[:1]),), (Delta(0, "", LOGPROBS[1:], STOP),)]
    response = ask(client, logprobs=True, top_logprobs=2)
    assert [entry.to_dict() for entry in response.choices[0].logprobs.content] == SHOWN
    assert service.requests[0].logprobs == 2


def test_logprobs_streamed_also_without_text(client, service):
    service.steps = [(Delta(0, "é", LOGPROBS[:1]),), (Delta(0, "", LOGPROBS[1:]),), (Delta(0, finish_reason=STOP),)]
    chunks = list(ask(client, logprobs=True, stream=True))
    shown = [e.to_dict() for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert shown == SHOWN
    assert service.requests[0].logprobs == 0


def test_the_generation_request_by_default(client, service):
    ask(client)
    (request,) = service.requests
    assert request.prompts == (ChatPrompt(({"role": "user", "content": "hi"},)),)
    assert request.sampling == Sampling(temperature=1.0)
    assert (request.model, request.seeded, request.n, request.max_tokens) == ("m", False, 1, None)
    assert (request.stop, request.ignore_eos, request.logprobs) == ((), False, None)


def test_the_generation_request_with_all_parameters(client, service):
    extra = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True}
    extra["chat_template_kwargs"] = {"enable_thinking": False}
    ask(
        client,
        temperature=0.5,
        top_p=0.9,
        seed=-3,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={"12": -100, "7": 2.5},
        max_completion_tokens=9,
        stop=["a", "b"],
        n=2,
        user="u",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        extra_body=extra,
    )
    (request,) = service.requests
    assert request.sampling == Sampling(0.5, 0.9, 5, 0.1, -3, 1.1, 1.0, -1.0, ((12, -100.0), (7, 2.5)))
    assert (request.seeded, request.n, request.max_tokens, request.stop) == (True, 2, 9, ("a", "b"))
    assert request.ignore_eos is True
    assert request.prompts[0].template_kwargs == {"enable_thinking": False}


PREFIX = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}]


def test_the_last_message_is_continued_on_request(http, service):
    for more in (
        {},
        {"continue_final_message": True},
        {"continue_final_message": True, "add_generation_prompt": False},
    ):
        assert http.post("/v1/chat/completions", json={"messages": PREFIX, **more}).status_code == 200
    assert [request.prompts[0].continue_final for request in service.requests] == [False, True, True]


@pytest.mark.parametrize(
    "body, param",
    [
        ({"messages": PREFIX[:1], "continue_final_message": True}, "continue_final_message"),
        ({"messages": PREFIX, "continue_final_message": "yes"}, "continue_final_message"),
        ({"messages": PREFIX, "add_generation_prompt": False}, "add_generation_prompt"),
    ],
)
def test_what_cannot_be_continued(http, service, body, param):
    response = http.post("/v1/chat/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert service.requests == []
