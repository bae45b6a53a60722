"""/v1/completions as the official client sees it."""

from __future__ import annotations

import pytest

from millstream.types import Delta, FinishReason, Sampling, TextLogprob, TextPrompt, TokenPrompt

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


def ask(client, prompt="Once", **more):
    return client.completions.create(model="m", prompt=prompt, **more)


def test_whole_response(client, service):
    response = ask(client)
    assert response.id.startswith("cmpl-") and response.object == "text_completion" and response.model == "m"
    (choice,) = response.choices
    assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (0, "Hello world", "stop", None)
    assert response.usage.to_dict() == USAGE
    (request,) = service.requests
    assert (request.default_max_tokens, request.sampling) == (16, Sampling(temperature=1.0))


@pytest.mark.parametrize(
    "prompt, prompts",
    [
        ("Once", (TextPrompt("Once"),)),
        ("", (TextPrompt(""),)),
        (["a", "b"], (TextPrompt("a"), TextPrompt("b"))),
        ([1, 2, 3], (TokenPrompt((1, 2, 3)),)),
        ([[1, 2], [3]], (TokenPrompt((1, 2)), TokenPrompt((3,)))),
        ([[1], "a"], (TokenPrompt((1,)), TextPrompt("a"))),
    ],
)
def test_forms_of_a_prompt(client, service, prompt, prompts):
    ask(client, prompt)
    assert service.requests[0].prompts == prompts


def test_several_prompts_are_numbered_prompt_by_prompt(client, service):
    service.steps = [tuple(Delta(i, f"t{i}", finish_reason=STOP) for i in (3, 1, 0, 2))]
    response = ask(client, ["a", "b"], n=2)
    assert [(c.index, c.text) for c in response.choices] == [(0, "t0"), (1, "t1"), (2, "t2"), (3, "t3")]


def test_stream(client):
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    *chunks, last = chunks
    assert [(c.object, c.choices[0].text, c.choices[0].finish_reason) for c in chunks] == [
        ("text_completion", "Hello", None),
        ("text_completion", " world", "stop"),
    ]
    assert all(c.to_dict()["usage"] is None for c in chunks)
    assert last.choices == [] and last.usage.total_tokens == 12


PIECES = (
    TextLogprob("ab", b"ab", -0.5, (("ab", b"ab", -0.5), ("\ufffd", b"\xf0\x9f", -2.0))),
    TextLogprob("\ufffd", b"\xf0", -1.0, (("\ufffd", b"\xf0", -1.0),), offset=2),
    TextLogprob("c", b"c", float("-inf"), (), offset=2),
)
TOKENS = ["ab", "bytes:\\xf0", "c"]
TOPS = [{"ab": -0.5, "bytes:\\xf0\\x9f": -2.0}, {"bytes:\\xf0": -1.0}, {}]


def test_logprobs_whole(client, service):
    service.steps = [(Delta(0, "ab", PIECES[:1]),), (Delta(0, "c", PIECES[1:], STOP),)]
    logprobs = ask(client, logprobs=2).choices[0].logprobs
    assert (logprobs.tokens, logprobs.token_logprobs) == (TOKENS, [-0.5, -1.0, -9999.0])
    assert (logprobs.top_logprobs, logprobs.text_offset) == (TOPS, [0, 2, 2])
    assert service.requests[0].logprobs == 2


def test_streamed_logprobs(client, service):
    service.steps = [(Delta(0, "ab", PIECES[:1]),), (Delta(0, "", PIECES[1:2]),), (Delta(0, "c", PIECES[2:], STOP),)]
    shown = [chunk.choices[0].logprobs for chunk in ask(client, logprobs=0, stream=True)]
    assert [part.tokens[0] for part in shown] == TOKENS
    assert [part.text_offset for part in shown] == [[0], [2], [2]]
    assert all(part.top_logprobs is None for part in shown)
    assert service.requests[0].logprobs == 0
