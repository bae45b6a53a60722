"""POST /api/chat and /api/generate: the shapes of the answers, and how long the model stays loaded."""

from __future__ import annotations

import json
import math

import pytest

from millstream import errors
from millstream.api.app import create_app
from millstream.types import (
    CallDelta,
    Delta,
    FinishReason,
    TextLogprob,
)
from support.ollama import CHAT, PROMPT, WEATHER, WHOLE, lines, refusal
from support.openapi import Document
from support.services import services

STOP, LENGTH, CALLS = FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS
FIGURES = {
    "total_duration",
    "load_duration",
    "prompt_eval_count",
    "prompt_eval_duration",
    "eval_count",
    "eval_duration",
}


@pytest.fixture(scope="module")
def page() -> Document:
    return Document(create_app(services(None), body_limit=1000).openapi())


# Answers


def test_a_chat_is_a_stream_unless_the_client_says_no(http, service):
    found = lines(http.post("/api/chat", json=CHAT))
    assert [line["message"] for line in found] == [
        {"role": "assistant", "content": "Hello"},
        {"role": "assistant", "content": " world"},
        {"role": "assistant", "content": ""},
    ]
    assert [line["done"] for line in found] == [False, False, True]
    assert all(line["model"] == "org/tiny" and line["created_at"].endswith("Z") for line in found)
    assert found[0].keys() == {"model", "created_at", "message", "done"}
    assert found[-1].keys() == {"model", "created_at", "message", "done", "done_reason"} | FIGURES
    assert (found[-1]["prompt_eval_count"], found[-1]["eval_count"]) == (7, 5)


def test_a_whole_chat(http, page):
    response = http.post("/api/chat", json=CHAT | WHOLE)
    answer = response.json()
    assert response.headers["content-type"] == "application/json"
    assert answer["message"] == {"role": "assistant", "content": "Hello world"}
    assert (answer["done"], answer["done_reason"]) == (True, "stop")
    assert answer.keys() == {"model", "created_at", "message", "done", "done_reason"} | FIGURES
    page.check("/api/chat", response)


def test_durations_are_measured(http, service):
    service.ends = False
    with http.stream("POST", "/api/chat", json=CHAT) as response:
        arriving = response.iter_lines()
        next(arriving)
        generation = service.generation()
        generation.waiting.wait(5)
        generation.push(None)
        last = json.loads(list(arriving)[-1])
    parts = last["load_duration"] + last["prompt_eval_duration"] + last["eval_duration"]
    assert last["total_duration"] == parts and all(last[name] > 0 for name in FIGURES)


def test_responses_to_a_prompt(http, page):
    whole = http.post("/api/generate", json=PROMPT | WHOLE)
    assert whole.json()["response"] == "Hello world" and "message" not in whole.json()
    page.check("/api/generate", whole)
    stream = http.post("/api/generate", json=PROMPT)
    assert [line["response"] for line in lines(stream)] == ["Hello", " world", ""]
    page.check("/api/generate", stream)


@pytest.mark.parametrize(
    "reason, told", [(STOP, "stop"), (LENGTH, "length"), (CALLS, "stop"), (FinishReason.CANCELLED, "stop")]
)
def test_why_it_ended(http, service, reason, told):
    service.steps = [(Delta(0, "a", finish_reason=reason),)]
    assert http.post("/api/chat", json=CHAT | WHOLE).json()["done_reason"] == told
    assert lines(http.post("/api/chat", json=CHAT))[-1]["done_reason"] == told


def test_reasoning_is_apart(http, service, page):
    service.steps = [(Delta(0, reasoning="hm"),), (Delta(0, "so", reasoning="."),), (Delta(0, finish_reason=STOP),)]
    stream = http.post("/api/chat", json=CHAT)
    messages = [line["message"] for line in lines(stream)]
    assert messages[0] == {"role": "assistant", "content": "", "thinking": "hm"}
    assert messages[1] == {"role": "assistant", "content": "so", "thinking": "."}
    page.check("/api/chat", stream)
    whole = http.post("/api/generate", json=PROMPT | WHOLE).json()
    assert (whole["thinking"], whole["response"]) == ("hm.", "so")
    assert lines(http.post("/api/generate", json=PROMPT))[0]["thinking"] == "hm"


def test_calls_are_sent_whole_when_they_are_complete(http, service, page):
    service.steps = [
        (Delta(0, "I look.", calls=(CallDelta(0, "call-1", "weather", '{"ci'),)),),
        (Delta(0, calls=(CallDelta(0, arguments='ty":"Bern"}'),)),),
        (Delta(0, calls=(CallDelta(1, "call-2", "time", ""),)),),
        (Delta(0, finish_reason=CALLS),),
    ]
    first = {"id": "call-1", "function": {"index": 0, "name": "weather", "arguments": {"city": "Bern"}}}
    second = {"id": "call-2", "function": {"index": 1, "name": "time", "arguments": {}}}
    stream = http.post("/api/chat", json=CHAT | {"tools": [WEATHER]})
    found = [line["message"] for line in lines(stream)]
    assert [(message["content"], message.get("tool_calls")) for message in found] == [
        ("I look.", None),
        ("", [first]),
        ("", [second]),
        ("", None),
    ]
    page.check("/api/chat", stream)
    whole = http.post("/api/chat", json=CHAT | WHOLE).json()["message"]
    assert whole == {"role": "assistant", "content": "I look.", "tool_calls": [first, second]}


def test_calls_that_do_not_count(http, service):
    service.steps = [
        (Delta(0, calls=(CallDelta(0, "call-1", "weather", '{"'),)),),
        (Delta(0, "<tool_call>", calls=(CallDelta(0, void=True),)),),
        (Delta(0, calls=(CallDelta(1, "call-2", "weather", '{"cut'),), finish_reason=LENGTH),),
    ]
    found = lines(http.post("/api/chat", json=CHAT))
    assert all("tool_calls" not in line["message"] for line in found)
    assert [line["message"]["content"] for line in found] == ["<tool_call>", ""]
    assert found[-1]["done_reason"] == "length"
    assert http.post("/api/chat", json=CHAT | WHOLE).json()["message"]["content"] == "<tool_call>"


def test_log_probabilities(http, service, page):
    top = (("hi", b"hi", -0.5), ("\ufffd", b"\xf0", -math.inf))
    service.steps = [(Delta(0, "hi", (TextLogprob("hi", b"hi", -0.5, top),)),), (Delta(0, finish_reason=STOP),)]
    stream = http.post("/api/chat", json=CHAT | {"logprobs": True, "top_logprobs": 2})
    (logprob,) = lines(stream)[0]["logprobs"]
    assert (logprob["token"], logprob["logprob"], logprob["bytes"]) == ("hi", -0.5, [104, 105])
    assert [each["logprob"] for each in logprob["top_logprobs"]] == [-0.5, -9999.0]
    page.check("/api/chat", stream)
    assert service.requests[-1].logprobs == 2
    assert len(http.post("/api/generate", json=PROMPT | WHOLE | {"logprobs": True}).json()["logprobs"]) == 1
    assert service.requests[-1].logprobs == 0


def test_an_error_inside_a_stream_is_its_last_line(http, service, page):
    service.steps = [(Delta(0, "cut"),), errors.StepFailed("bang")]
    stream = http.post("/api/chat", json=CHAT)
    assert lines(stream)[-1] == {"error": "bang"}
    page.check("/api/chat", stream)
    assert refusal(http.post("/api/chat", json=CHAT | WHOLE), 500) == "bang"


@pytest.mark.parametrize("more", [{}, WHOLE])
def test_an_error_before_the_first_line(http, service, more):
    service.start_error = errors.EngineBusy("full", active=4, waiting=9, retry_after=3)
    response = http.post("/api/chat", json=CHAT | more)
    assert refusal(response, 503) == "full" and response.headers["retry-after"] == "3"


def test_the_answer_repeats_the_name_of_the_request(http, service):
    service.cards = [*service.cards, type(service.cards[0])("other:latest", created=1, state="ready", aliases=("o",))]
    for name, served in [
        ("org/tiny", "org/tiny"),
        ("org/tiny:latest", "org/tiny"),
        ("other", "other:latest"),
        ("o", "other:latest"),
        ("o:latest", "other:latest"),
    ]:
        assert http.post("/api/chat", json=CHAT | WHOLE | {"model": name}).json()["model"] == name
        assert service.requests[-1].model == served
    without = {name: value for name, value in CHAT.items() if name != "model"}
    assert http.post("/api/chat", json=without | WHOLE).json()["model"] == "org/tiny"


def test_an_unknown_model(http, service):
    for path in ("/api/chat", "/api/generate", "/api/show", "/api/pull", "/api/embed"):
        message = refusal(http.post(path, json=CHAT | {"model": "nope", "prompt": "hi"}), 404)
        assert "model 'nope' not found" in message and "org/tiny, plain" in message
    assert not service.requests


# Loading and keeping


@pytest.mark.parametrize("path, empty", [("/api/chat", {"messages": []}), ("/api/generate", {"prompt": ""})])
@pytest.mark.parametrize("stream", [True, False])
def test_nothing_to_say_loads_the_model(http, service, page, path, empty, stream):
    response = http.post(path, json={"model": "org/tiny:latest", "stream": stream} | empty)
    assert (response.json()["done"], response.json()["done_reason"]) == (True, "load")
    page.check(path, response)
    assert (service.loads, service.kept, service.requests) == (["org/tiny"], [], [])
    assert http.post(path, json={"model": "org/tiny"}).json()["done_reason"] == "load"
    http.post(path, json={"model": "org/tiny", "keep_alive": "1h"})
    assert service.kept == [("org/tiny", 3600)]


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
@pytest.mark.parametrize("keep_alive", [0, "0", "0s", 0.0])
def test_nothing_to_say_and_nothing_to_keep_unloads_it(http, service, path, keep_alive):
    answer = http.post(path, json={"model": "org/tiny", "keep_alive": keep_alive}).json()
    assert answer["done_reason"] == "unload"
    assert (service.loads, service.kept) == ([], [("org/tiny", 0)])


def test_a_failed_model_is_not_loaded_again(http, service):
    card = type(service.cards[0])
    service.cards = [card("bad", created=1, state="failed", error="no weights.")]
    assert "no weights" in refusal(http.post("/api/generate", json={"model": "bad"}), 503)
    assert service.loads == []


@pytest.mark.parametrize(
    "value, seconds",
    [
        (0, 0),
        (300, 300),
        (1.5, 1.5),
        (-1, math.inf),
        ("-1", math.inf),
        ("-1m", math.inf),
        ("5m", 300),
        ("24h", 86400),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("300ms", 0.3),
        ("30", 30),
        (1e300, math.inf),
        ("999999999999h", math.inf),
    ],
)
def test_how_long_the_model_stays_loaded(http, service, value, seconds):
    service.ends = False
    with http.stream("POST", "/api/chat", json=CHAT | {"keep_alive": value}) as response:
        response.iter_raw()
        generation = service.generation()
        assert service.kept == [("org/tiny", pytest.approx(seconds))], "set while the request keeps the model in use"
        generation.push(None)
        response.read()


def test_a_request_without_keep_alive_changes_nothing(http, service):
    http.post("/api/chat", json=CHAT)
    http.post("/api/chat", json=CHAT | {"keep_alive": None})
    assert len(service.requests) == 2 and service.kept == []


def test_a_request_that_fails_keeps_nothing(http, service):
    service.start_error = errors.ContextOverflow("too long")
    assert refusal(http.post("/api/chat", json=CHAT | {"keep_alive": 0}), 400) == "too long"
    assert service.kept == []


def test_examples_of_the_document(http, page):
    for path, name in [("/api/chat", "OllamaChatRequest"), ("/api/generate", "OllamaGenerateRequest")]:
        content = page.page["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        assert content["examples"]
        for example in content["examples"].values():
            page.validate({"$ref": f"#/components/schemas/{name}"}, example["value"])
            response = http.post(path, json=example["value"])
            assert response.status_code == 200
            page.check(path, response)
