"""A trained vision model (shapes-vlm) end to end: concurrent and single requests, prefix cache, streaming."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from millstream.config import Settings
from support.server import RunningServer, running
from support.shapes import HOW_MANY, NUMBERS, WHAT, data_uri, draw, some_shapes

ASSET = Path(__file__).parent.parent / "assets" / "shapes-vlm"
TEXTS = {
    "Say hello.": "hello",
    "What colour is grass?": "green",
    "What colour is the sky?": "blue",
    "Count to four.": "one two three four",
}


@dataclass(frozen=True)
class Case:
    messages: list[dict[str, Any]]
    answer: str


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running(Settings((str(ASSET),), port=0, max_batch=8)) as subject:
        yield subject


@pytest.fixture(scope="module")
def http(server: RunningServer) -> Iterator[httpx.Client]:
    limits = httpx.Limits(max_connections=32)
    with httpx.Client(base_url=server.url, timeout=120, limits=limits) as client:
        yield client


def about(image: str, question: str) -> dict[str, Any]:
    content = [{"type": "text", "text": question}, {"type": "image_url", "image_url": {"url": image}}]
    return {"role": "user", "content": content}


def cases(seed: int) -> list[Case]:
    """Sixteen cases: two questions about twelve different images, and four of text only."""
    rng = random.Random(seed)
    found = [Case([{"role": "user", "content": question}], answer) for question, answer in TEXTS.items()]
    for number in range(12):
        count = 1 if number % 2 else 1 + number % 4
        shapes = some_shapes(rng, count)
        image = data_uri(draw(shapes, rng.choice((60, 96, 200))))
        if number % 2:
            found.append(Case([about(image, WHAT)], shapes[0].name))
        else:
            found.append(Case([about(image, HOW_MANY)], NUMBERS[count - 1]))
    rng.shuffle(found)
    return found


def ask(http: httpx.Client, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    body = {"messages": messages, "temperature": 0, "max_tokens": 12, **fields}
    reply = http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def content_of(reply: dict[str, Any]) -> str:
    content: str = reply["choices"][0]["message"]["content"]
    return content


def together(http: httpx.Client, requests: list[Case]) -> list[str]:
    with ThreadPoolExecutor(len(requests)) as pool:
        return [content_of(reply) for reply in pool.map(lambda case: ask(http, case.messages), requests)]


@pytest.mark.parametrize("question", [WHAT, HOW_MANY])
def test_answers_match_the_image(http: httpx.Client, question: str, whole: bool) -> None:
    """Of any size and place, none of which it has seen before; 500 with `--whole`."""
    chance = random.Random(question)
    asked = []
    for _ in range(500 if whole else 100):
        shapes = some_shapes(chance, 1 if question == WHAT else chance.randint(1, 4))
        picture = data_uri(draw(shapes, chance.choice((60, 96, 200))))
        asked.append(Case([about(picture, question)], shapes[0].name if question == WHAT else NUMBERS[len(shapes) - 1]))
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda case: content_of(ask(http, case.messages)), asked))
    right = sum(answer == case.answer for answer, case in zip(answers, asked, strict=True))
    assert right >= 0.98 * len(asked)


@pytest.mark.parametrize("seed", [11, 12])
def test_sixteen_concurrent_requests_each_use_their_own_image(http: httpx.Client, seed: int) -> None:
    requests = cases(seed)
    answers = together(http, requests)
    assert answers == [case.answer for case in requests]
    assert together(http, requests) == answers, "with warm caches"
    assert [content_of(ask(http, case.messages)) for case in requests] == answers, "one at a time"


def test_a_second_question_about_an_image_hits_the_prefix_cache(http: httpx.Client) -> None:
    rng = random.Random(5)
    [shape] = some_shapes(rng, 1)
    first = about(data_uri(draw([shape], 90)), WHAT)
    reply_before = ask(http, [first])
    assert content_of(reply_before) == shape.name
    messages = [first, {"role": "assistant", "content": shape.name}, {"role": "user", "content": HOW_MANY}]
    reply = ask(http, messages)
    assert content_of(reply) == "one"
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
    assert content_of(ask(http, messages)) == "one"


def test_another_image_with_the_same_text_misses_the_prefix_cache(http: httpx.Client) -> None:
    rng = random.Random(6)
    names = set()
    for _ in range(8):
        [shape] = some_shapes(rng, 1)
        assert content_of(ask(http, [about(data_uri(draw([shape], 96)), WHAT)])) == shape.name
        names.add(shape.name)
    assert len(names) > 3


def test_the_last_question_is_about_the_last_image(http: httpx.Client) -> None:
    rng = random.Random(7)
    for _ in range(4):
        [one], [other] = some_shapes(rng, 1), some_shapes(rng, 1)
        messages = [
            about(data_uri(draw([one])), WHAT),
            {"role": "assistant", "content": one.name},
            about(data_uri(draw([other])), WHAT),
        ]
        assert content_of(ask(http, messages)) == other.name


def test_a_stream_over_the_official_client(server: RunningServer) -> None:
    [shape] = some_shapes(random.Random(8), 1)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(
            model="shapes-vlm",
            messages=[about(data_uri(draw([shape]), "jpeg"), "What's in this image?")],  # type: ignore[list-item]
            temperature=0,
            max_tokens=12,
            stream=True,
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == shape.name


def test_several_images_in_one_message(http: httpx.Client) -> None:
    """The model is not trained for two images; the test checks only that both are in the prompt."""
    shapes = [some_shapes(random.Random(seed), 1) for seed in (1, 2)]
    parts = [{"type": "image_url", "image_url": {"url": data_uri(draw(found))}} for found in shapes]
    content = [*parts, {"type": "text", "text": WHAT}]
    one = ask(http, [{"role": "user", "content": content[1:]}])["usage"]["prompt_tokens"]
    two = ask(http, [{"role": "user", "content": content}])["usage"]["prompt_tokens"]
    assert two == one + 36
