"""One conversation in every dialect: the same prompt tokens, the same output, and each turn finds its prefix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from support.server import RunningServer

SYSTEM = "You are a helpful assistant who answers in one short sentence. " * 5
FIRST = "What is the capital of France?"
SECOND = "And of Italy?"
TOKENS = 4

Turns = Sequence[tuple[str, str]]
"""Role and text, from the first user turn on."""


@dataclass(frozen=True)
class Answer:
    text: str
    prompt_tokens: int
    cached_tokens: int


def chat(url: str, turns: Turns) -> Answer:
    messages = [{"role": "system", "content": SYSTEM}, *_messages(turns)]
    body = post(url, "/v1/chat/completions", {"messages": messages, "max_tokens": TOKENS, "temperature": 0})
    usage = body["usage"]
    text = body["choices"][0]["message"]["content"]
    return Answer(text, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])


def responses(url: str, turns: Turns) -> Answer:
    asked = {"instructions": SYSTEM, "input": _messages(turns), "max_output_tokens": TOKENS, "temperature": 0}
    body = post(url, "/v1/responses", asked | {"store": False})
    usage = body["usage"]
    text = body["output"][0]["content"][0]["text"]
    return Answer(text, usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"])


def anthropic(url: str, turns: Turns) -> Answer:
    system = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
    asked = {"model": "", "system": system, "messages": _messages(turns), "max_tokens": TOKENS, "temperature": 0}
    body = post(url, "/v1/messages", asked, {"anthropic-version": "2023-06-01"})
    usage = body["usage"]
    cached = usage["cache_read_input_tokens"]
    total = usage["input_tokens"] + cached + usage["cache_creation_input_tokens"]
    return Answer(body["content"][0]["text"], total, cached)


def ollama(url: str, turns: Turns) -> Answer:
    messages = [{"role": "system", "content": SYSTEM}, *_messages(turns)]
    asked = {"model": "smollm2-135m-instruct", "messages": messages, "stream": False}
    body = post(url, "/api/chat", asked | {"options": {"temperature": 0, "num_predict": TOKENS}})
    return Answer(body["message"]["content"], body["prompt_eval_count"], -1)


def _messages(turns: Turns) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in turns]


def post(url: str, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> dict[str, Any]:
    response = httpx.post(url + path, json=body, headers=headers, timeout=120)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


DIALECTS = (chat, responses, anthropic, ollama)


def test_all_dialects_give_the_same_tokens(demo: RunningServer) -> None:
    first = [dialect(demo.url, [("user", FIRST)]) for dialect in DIALECTS]
    assert {(answer.text, answer.prompt_tokens) for answer in first} == {(first[0].text, first[0].prompt_tokens)}
    turns = [("user", FIRST), ("assistant", first[0].text), ("user", SECOND)]
    second = [dialect(demo.url, turns) for dialect in DIALECTS]
    assert {(answer.text, answer.prompt_tokens) for answer in second} == {(second[0].text, second[0].prompt_tokens)}


@pytest.mark.parametrize("dialect", (chat, responses, anthropic))
def test_the_next_turn_finds_its_prefix(demo: RunningServer, dialect: Callable[[str, Turns], Answer]) -> None:
    httpx.post(f"{demo.url}/v1/models/smollm2-135m-instruct/cache/clear").raise_for_status()
    first = dialect(demo.url, [("user", FIRST)])
    assert first.cached_tokens == 0
    turns = [("user", FIRST), ("assistant", first.text), ("user", SECOND)]
    second = dialect(demo.url, turns)
    assert second.cached_tokens >= first.prompt_tokens - 32  # up to the last whole block of the first turn


def test_a_turn_of_one_dialect_finds_the_prefix_of_another(demo: RunningServer) -> None:
    httpx.post(f"{demo.url}/v1/models/smollm2-135m-instruct/cache/clear").raise_for_status()
    first = anthropic(demo.url, [("user", FIRST)])
    turns = [("user", FIRST), ("assistant", first.text), ("user", SECOND)]
    assert responses(demo.url, turns).cached_tokens >= first.prompt_tokens - 32
