"""Speculative decoding over HTTP, with OpenAI's client: the same answers, honest usage, and clients that leave."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from millstream.config import Settings
from millstream.engine.generation.scheduler import GenerationScheduler
from millstream.engine.generation.tuning import SchedulerSettings
from millstream.loading import generation
from millstream.model_facts import GenerationFacts
from support.drafting import drafting
from support.server import RunningServer, running
from support.tiny import write_servable

SCHEMA = {
    "type": "object",
    "properties": {"number_of_boxes": {"type": "integer", "maximum": 99}, "colour": {"enum": ["red", "green"]}},
    "required": ["number_of_boxes", "colour"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "boxes", "schema": SCHEMA}}
TOOL: Any = {"type": "function", "function": {"name": "count_all_boxes", "parameters": SCHEMA}}

LETTERS = {str(ord(letter) - ord("!")): 50 for letter in "abcdefghijklmnopqrstuvwxyz"}
"""Ids of the byte tokenizer. Other bytes are often no text, and a text with their marks has other tokens."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Asks for drafts at random, whether or not they pay: nothing pays for a model of this size."""

    def always(settings: SchedulerSettings, facts: GenerationFacts) -> GenerationScheduler:
        return drafting(3, facts)

    folder = write_servable(tmp_path_factory.mktemp("drafted") / "tiny", max_position_embeddings=2048)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "make_scheduler", always)
        with running(Settings((str(folder),), port=0, max_batch=6, isolation="thread")) as server:
            yield server


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client: openai.OpenAI, number: int, **changes: Any) -> Any:
    fields = {
        "messages": [{"role": "user", "content": f"{number} boxes are red, and red boxes are {number}"}],
        "max_tokens": 40,
        "temperature": 0.7 * (number % 2),
        "seed": number,
        "logit_bias": LETTERS,
        **changes,
    }
    return client.chat.completions.create(model="", **fields)


def details(answer: Any) -> tuple[int, int]:
    found = answer.usage.completion_tokens_details
    return found.accepted_prediction_tokens, found.rejected_prediction_tokens


OFF = {"extra_body": {"speculation": False}}


def test_a_prediction_changes_the_speed_alone(client: openai.OpenAI) -> None:
    plain = chat(client, 1, max_tokens=60, **OFF)
    text = plain.choices[0].message.content
    assert details(plain) == (0, 0)
    for content in (text, [{"type": "text", "text": text[:20]}, {"type": "text", "text": text[20:]}]):
        predicted = chat(client, 1, max_tokens=60, prediction={"type": "content", "content": content})
        assert predicted.choices == plain.choices
        accepted, _ = details(predicted)
        assert 5 < accepted <= predicted.usage.completion_tokens == plain.usage.completion_tokens
    wrong = chat(client, 1, max_tokens=60, prediction={"type": "content", "content": "nothing like it"})
    assert wrong.choices == plain.choices


def test_a_stream_is_the_same_and_ends_with_usage(client: openai.OpenAI) -> None:
    plain = chat(client, 2, **OFF)
    prediction = {"type": "content", "content": plain.choices[0].message.content}
    chunks = list(chat(client, 2, stream=True, stream_options={"include_usage": True}, prediction=prediction))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == plain.choices[0].message.content
    accepted, _ = details(chunks[-1])
    assert accepted > 3


def test_a_stop_string_in_the_middle_of_a_draft(client: openai.OpenAI) -> None:
    """The text ends there, with what was drafted until then in its usage."""
    plain = chat(client, 4, max_tokens=60, **OFF)
    text = plain.choices[0].message.content
    stop = text[30:33]
    stopped = chat(client, 4, max_tokens=60, stop=stop, prediction={"type": "content", "content": text})
    assert stopped.choices[0].message.content == text[: text.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"
    accepted, _ = details(stopped)
    assert 0 < accepted <= stopped.usage.completion_tokens


def test_structured_output_and_tool_calls_are_the_same(client: openai.OpenAI) -> None:
    forms: list[dict[str, Any]] = [
        {"response_format": FORMAT},
        {"tools": [TOOL], "tool_choice": "required"},
        {"response_format": FORMAT, "logprobs": True, "top_logprobs": 2},
        {"n": 3, "response_format": FORMAT, "presence_penalty": 0.5},
    ]
    for number, form in enumerate(forms):
        plain, fast = chat(client, number, max_tokens=120, **form, **OFF), chat(client, number, max_tokens=120, **form)
        for one, other in zip(plain.choices, fast.choices, strict=True):
            assert said(one) == said(other)
        accepted, rejected = details(fast)
        assert accepted > rejected, "a grammar is seldom wrong"
        assert details(plain) == (0, 0)


def said(choice: Any) -> object:
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    tokens = [token.token for token in choice.logprobs.content] if choice.logprobs else []
    return choice.message.content, calls, choice.finish_reason, tokens


def test_clients_that_leave_in_the_middle(server: RunningServer, client: openai.OpenAI) -> None:
    """Forty at once, half of them leave: the others get what they get alone, and nothing stays."""
    alone = {number: chat(client, number, **OFF).choices[0].message.content for number in range(5)}

    def visit(number: int) -> str | None:
        text = alone[number % 5]
        form = {"response_format": FORMAT} if number % 4 == 1 else {"prediction": {"type": "content", "content": text}}
        if number % 2:
            stream = chat(client, number % 5, stream=True, **form)
            for _, _ in zip(stream, range(number % 7), strict=False):
                pass
            stream.close()
            return None
        answer = chat(client, number % 5, **form)
        return str(answer.choices[0].message.content) if "prediction" in form else None

    with ThreadPoolExecutor(10) as pool:
        for number, text in zip(range(40), pool.map(visit, range(40)), strict=True):
            assert text is None or text == alone[number % 5]
    deadline = time.monotonic() + 60
    while (model := httpx.get(f"{server.url}/v1/models").json()["data"][0])["active"] or model["waiting"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_server_tells_what_was_drafted(server: RunningServer, client: openai.OpenAI) -> None:
    """In /v1/models, metrics and the journal. Engines report at least when they become idle."""
    chat(client, 3, response_format=FORMAT, max_tokens=120)
    deadline = time.monotonic() + 60
    counted: dict[str, tuple[int, int]] = {}
    while not counted.get("grammar", (0, 0))[1]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
        [model] = httpx.get(f"{server.url}/v1/models").json()["data"]
        speculation = model["speculation"]
        assert speculation["drafters"] == ["grammar", "prediction", "prompt-lookup"]
        counted = {each["drafter"]: (each["proposed"], each["accepted"]) for each in speculation["drafts"]}
    assert all(proposed >= accepted for proposed, accepted in counted.values()) and speculation["passes"]
    metrics = httpx.get(f"{server.url}/metrics").text
    pattern = r'millstream_draft_tokens_total\{drafter="grammar",model="[^"]+",outcome="accepted"\} (\S+)'
    [accepted] = re.findall(pattern, metrics)
    assert float(accepted) >= counted["grammar"][1]
    assert "millstream_verifying_passes_total" in metrics and "millstream_speculation_gain" in metrics
    recent = httpx.get(f"{server.url}/server/requests").json()["recent"]
    assert 0 < recent[0]["accepted_tokens"] <= recent[0]["drafted_tokens"]
