"""`prediction` and `speculation` in OpenAI's text endpoints, and what usage tells of drafts, with OpenAI's client."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from millstream.model_facts import DraftCount, ModelCard, SpeculationCard

MESSAGES: Any = [{"role": "user", "content": "Edit it."}]
PARTS: Any = [{"type": "text", "text": "x = 1\n"}, {"type": "text", "text": "print(x)"}]


@pytest.mark.parametrize(("content", "text"), [("x = 1", "x = 1"), (PARTS, "x = 1\nprint(x)"), ("", ""), ([], "")])
def test_a_prediction_is_text_or_parts(client: openai.OpenAI, service: Any, content: Any, text: str) -> None:
    client.chat.completions.create(model="", messages=MESSAGES, prediction={"type": "content", "content": content})
    assert service.requests[0].prediction == text


def test_it_goes_with_all_that_openai_refuses_beside_it(client: openai.OpenAI, service: Any) -> None:
    client.chat.completions.create(
        model="",
        messages=MESSAGES,
        prediction={"type": "content", "content": "yes"},
        n=2,
        logprobs=True,
        presence_penalty=1.0,
        frequency_penalty=1.0,
        max_completion_tokens=5,
        tools=[{"type": "function", "function": {"name": "f"}}],
    )
    request = service.requests[0]
    assert request.prediction == "yes" and request.n == 2 and request.speculate


def test_completions_take_it_as_well(http: httpx.Client, service: Any) -> None:
    body = {"prompt": "x", "prediction": {"type": "content", "content": "y"}, "speculation": False}
    assert http.post("/v1/completions", json=body).status_code == 200
    assert service.requests[0].prediction == "y" and not service.requests[0].speculate


BAD: list[tuple[Any, str, str]] = [
    ("text", "prediction", 'the type "content"'),
    ([], "prediction", 'the type "content"'),
    ({"content": "x"}, "prediction", 'the type "content"'),
    ({"type": "text", "content": "x"}, "prediction", 'the type "content"'),
    ({"type": "content"}, "prediction.content", "a string or a list"),
    ({"type": "content", "content": 5}, "prediction.content", "a string or a list"),
    ({"type": "content", "content": ["x"]}, "prediction.content[0]", 'the type "text"'),
    ({"type": "content", "content": [*PARTS, {"type": "text"}]}, "prediction.content[2]", "and a text"),
    ({"type": "content", "content": [{"type": "image_url", "text": ""}]}, "prediction.content[0]", 'type "text"'),
]


@pytest.mark.parametrize(("value", "param", "reason"), BAD)
def test_what_is_no_prediction_is_refused(http: httpx.Client, value: Any, param: str, reason: str) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": MESSAGES, "prediction": value})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and reason in error["message"]


def test_null_is_none_and_others_are_ignored(http: httpx.Client, service: Any) -> None:
    body = {
        "messages": MESSAGES,
        "prediction": None,
        "speculation": None,
        "speculative.n_max": 4,
        "num_draft_tokens": 2,
    }
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    assert service.requests[0].prediction == "" and service.requests[0].speculate
    refused = http.post("/v1/chat/completions", json={"messages": MESSAGES, "speculation": "no"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "speculation"


def test_usage_tells_what_became_of_drafts(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="", messages=MESSAGES)
    chunks = list(
        client.chat.completions.create(model="", messages=MESSAGES, stream=True, stream_options={"include_usage": True})
    )
    text = client.completions.create(model="", prompt="x")
    for usage in (whole.usage, chunks[-1].usage, text.usage):
        assert usage is not None and usage.completion_tokens_details is not None
        assert usage.completion_tokens_details.accepted_prediction_tokens == 2
        assert usage.completion_tokens_details.rejected_prediction_tokens == 1


def test_models_tell_their_drafters(http: httpx.Client, service: Any) -> None:
    drafts = (DraftCount("grammar", 10, 9),)
    speculation = SpeculationCard(("grammar", "prompt-lookup"), passes=4, drafts=drafts, gain=1.5)
    service.cards = (ModelCard("a", 1, "ready", speculation=speculation), ModelCard("b", 1, "unloaded"))
    fast, plain = http.get("/v1/models").json()["data"]
    assert fast["speculation"] == {
        "drafters": ["grammar", "prompt-lookup"],
        "passes": 4,
        "gain": 1.5,
        "drafts": [{"drafter": "grammar", "proposed": 10, "accepted": 9}],
    }
    assert plain["speculation"] is None
