"""Thinking budgets over HTTP with a real engine: the row goes on, so its place, its figures and its prompt stay as they
are. Also what closing a reasoning in the prompt does to the context, and what `n` choices find in the cache."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from millstream.config import ModelSpec, Settings
from support.server import RunningServer, running
from support.tiny import CHAT_TEMPLATE, write_servable

CONTEXT = 768
CLOSING = "\n</think>\n\n"
"""One token a character: the tokenizer knows bytes only."""
LETTERS = {str(letter): 100 for letter in range(30, 90)}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder: Path = write_servable(tmp_path_factory.mktemp("budgets") / "tiny", max_position_embeddings=CONTEXT)
    template = {
        "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE + "{% if add_generation_prompt %}<think>{% endif %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(template))
    spec = ModelSpec(str(folder), name="tiny", reasoning_format="think")
    with running(Settings((spec,), port=0, isolation="thread", max_batch=1)) as server:
        yield server


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def body(text: str, **more: Any) -> dict[str, Any]:
    asked = [{"role": "user", "content": text}]
    return {"messages": asked, "max_tokens": 40, "temperature": 0, "ignore_eos": True, "logit_bias": LETTERS} | more


def ask(http: httpx.Client, text: str, **more: Any) -> Any:
    reply = http.post("/v1/chat/completions", json=body(text, **more))
    assert reply.status_code == 200, reply.text
    return reply.json()


def last_record(http: httpx.Client) -> Any:
    return http.get("/server/requests").json()["recent"][0]


def test_usage_and_the_log_have_the_figures_of_one_request(http: httpx.Client) -> None:
    answer = ask(http, "one " * 30, thinking_budget=9, prompt_logprobs=0, logprobs=True)
    usage, choice = answer["usage"], answer["choices"][0]
    assert usage["completion_tokens"] == 40 and usage["completion_tokens_details"]["reasoning_tokens"] == 9
    assert len(choice["message"]["reasoning_content"]) == 9
    assert len(choice["message"]["content"]) == 40 - 9 - len(CLOSING)
    written = "".join(entry["token"] for entry in choice["logprobs"]["content"])
    assert written == choice["message"]["reasoning_content"] + CLOSING + choice["message"]["content"]
    assert len(answer["prompt_logprobs"]) == usage["prompt_tokens"]
    ask(http, "two " * 30, thinking_budget=9)
    assert last_record(http)["cached_tokens"] == 0, "the row that closed its reasoning found nothing of its own"
    record = ask(http, "two " * 30, thinking_budget=9)["usage"], last_record(http)
    assert record[0]["prompt_tokens_details"]["cached_tokens"] == record[1]["cached_tokens"] > 100


def test_blank_reasoning_keeps_the_prompt_log_probabilities(http: httpx.Client) -> None:
    """The first delta, which reports them, comes after the reasoning has been closed."""
    answer = ask(http, "hi", thinking_budget=3, prompt_logprobs=0, logit_bias={"220": 100})
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize("seed", [1, 2])
def test_a_stream_says_the_same(http: httpx.Client, seed: int) -> None:
    more = {"thinking_budget": 7, "temperature": 1, "seed": seed, "stop": ["\u00e9"]}
    message = ask(http, "stream", **more)["choices"][0]["message"]
    found = {"reasoning_content": "", "content": ""}
    with http.stream("POST", "/v1/chat/completions", json=body("stream", stream=True, **more)) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                delta = json.loads(line[6:])["choices"][0]["delta"]
                found = {key: text + (delta.get(key) or "") for key, text in found.items()}
    assert found == {key: message[key] for key in found}
    assert len(found["reasoning_content"]) == 7


def test_random_numbers_and_penalties_are_those_of_the_whole_output(http: httpx.Client) -> None:
    """A flat distribution over the letters makes a token a function of the random number alone."""

    def tokens(**more: Any) -> list[str]:
        answer = ask(http, "draw", temperature=2, logprobs=True, max_tokens=40, **more)
        return [entry["token"] for entry in answer["choices"][0]["logprobs"]["content"]]

    for seed in (3, 4):
        free, closed = tokens(seed=seed), tokens(seed=seed, thinking_budget=6)
        assert closed[:6] == free[:6]
        after = 6 + len(CLOSING)
        assert closed[after : after + 6] != closed[:6]
        assert sum(one == other for one, other in zip(closed[after:], free[after:], strict=True)) > 5
    two = {"40": 100, "41": 99, "42": 98}
    frequent = ask(http, "two", logit_bias=two, frequency_penalty=2, thinking_budget=6, max_tokens=24)["choices"][0]
    message = frequent["message"]
    letters = message["reasoning_content"] + message["content"]
    assert max(map(letters.count, set(letters))) <= 6, "the penalties know the letters of the reasoning"


def test_a_row_that_closes_its_reasoning_keeps_its_place(http: httpx.Client, server: RunningServer) -> None:
    """There is one row. The other request asks for so little that it would end first if it came between."""
    first = body("first", thinking_budget=150, max_tokens=400, stream=True)
    with http.stream("POST", "/v1/chat/completions", json=first) as reply:
        lines = reply.iter_lines()
        next(lines)
        with httpx.Client(base_url=server.url, timeout=60) as other:
            second = threading.Thread(target=ask, args=(other, "second"), kwargs={"max_tokens": 1})
            second.start()
            assert [line for line in lines if line][-1] == "data: [DONE]"
            second.join()
    ended = [record["completion_tokens"] for record in http.get("/server/requests").json()["recent"][:2]]
    assert ended == [1, 400], "newest first"


@pytest.mark.parametrize("more", [{"thinking_budget": 0}, {"response_format": {"type": "json_object"}}])
def test_what_closes_the_reasoning_in_the_prompt_must_fit_the_context(http: httpx.Client, more: dict[str, Any]) -> None:
    around = ask(http, "", max_tokens=1)["usage"]["prompt_tokens"]
    room = CONTEXT - around - len(CLOSING)
    for max_tokens in (20, None, -1):
        limit = {} if max_tokens is None else {"max_tokens": max_tokens}
        asked = {"temperature": 0, **more, **limit}
        fits = http.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "z" * (room - 1)}], **asked}
        )
        assert fits.status_code == 200, fits.text
        assert fits.json()["usage"]["completion_tokens"] == 1
        beyond = http.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "z" * room}], **asked}
        )
        assert beyond.status_code == 400, beyond.text
        assert beyond.json()["error"]["code"] == "context_length_exceeded"


def test_choices_that_find_the_prompt_of_each_other_do_not_count_as_cached(http: httpx.Client) -> None:
    for n in (1, 3):
        text = f"{n} question " * 12
        cold, record = ask(http, text, n=n)["usage"], last_record(http)
        assert cold["prompt_tokens_details"]["cached_tokens"] == record["cached_tokens"] == 0
        again, record = ask(http, text, n=n)["usage"], last_record(http)
        cached = again["prompt_tokens_details"]["cached_tokens"]
        assert record["cached_tokens"] == cached
        assert again["prompt_tokens"] - 20 < cached < again["prompt_tokens"]
    prompts = ["the mill turns " * 4, "the stream runs " * 4]
    for cached in (False, True):
        reply = http.post("/v1/completions", json={"prompt": prompts, "n": 2, "max_tokens": 2}).json()["usage"]
        found = reply["prompt_tokens_details"]["cached_tokens"]
        assert found > reply["prompt_tokens"] - 40 if cached else found == 0
