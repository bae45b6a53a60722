"""Structured output of the demo model over HTTP: random schemas, and the official client's parse helpers."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pydantic
import pytest

from millstream.config import Settings
from support.schemas import random_schema
from support.server import RunningServer, running

SCHEMAS, SOME = 300, 8
ROWS = 32
FREE, FEW = 6, 3


@pytest.fixture(scope="module")
def wide(demo_path: Path, whole: bool, request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    """A server of the demo model with many rows; for few schemas, the one that other tests use."""
    if not whole:
        yield request.getfixturevalue("demo")
        return
    with running(Settings(port=0, max_batch=ROWS)) as server:
        yield server


async def ask(client: httpx.AsyncClient, gate: asyncio.Semaphore, **settings: Any) -> dict[str, Any]:
    async with gate:
        reply = await client.post("/v1/chat/completions", json={"temperature": 1.0, **settings}, timeout=600)
    assert reply.status_code == 200, reply.text
    choice: dict[str, Any] = reply.json()["choices"][0]
    return choice


def guided(number: int) -> dict[str, Any]:
    schema = random_schema(number)
    response_format = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}
    content = "Answer with JSON."
    return {
        "messages": [{"role": "user", "content": content}],
        "response_format": response_format,
        "seed": number,
        "max_tokens": 100,
    }


def free(number: int) -> dict[str, Any]:
    """Returns an unconstrained request. It is greedy, because rounding depends on the batch size: with random sampling,
    a difference of a millionth may select another token. The tests of the tiny models compare sampled rows."""
    content = f"Tell me a story about {number + 2} mills."
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 20}


def test_random_schemas_and_the_other_rows_of_the_batch(wide: RunningServer, whole: bool) -> None:
    """All 300 of them with `--whole`."""
    count, others = (SCHEMAS, FREE) if whole else (SOME, FEW)

    async def run() -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
        gate = asyncio.Semaphore(2 * ROWS)
        async with httpx.AsyncClient(base_url=wide.url) as client:
            alone = await asyncio.gather(*(ask(client, gate, **free(number)) for number in range(others)))
            together = [asyncio.create_task(ask(client, gate, **free(number))) for number in range(others)]
            answers = await asyncio.gather(*(ask(client, gate, **guided(number)) for number in range(count)))
            return alone, await asyncio.gather(*together), answers

    alone, together, answers = asyncio.run(run())
    reasons = Counter(choice["finish_reason"] for choice in answers)
    for number, choice in enumerate(answers):
        if choice["finish_reason"] == "stop":
            value = json.loads(choice["message"]["content"])
            jsonschema.validate(value, random_schema(number), jsonschema.Draft202012Validator)
    assert reasons["stop"] >= 0.85 * count, reasons
    assert [choice["message"] for choice in together] == [choice["message"] for choice in alone]


class Pet(pydantic.BaseModel):
    kind: Literal["cat", "dog"]
    name: str = pydantic.Field(max_length=12)
    age: int = pydantic.Field(ge=0, le=30)


QUESTION: Any = [{"role": "user", "content": "Invent a pet. Give its kind, name and age as JSON."}]


def test_the_client_parses_responses_into_a_model(demo_client: openai.OpenAI) -> None:
    reply = demo_client.chat.completions.parse(model="", messages=QUESTION, response_format=Pet, seed=1, max_tokens=60)
    message = reply.choices[0].message
    assert isinstance(message.parsed, Pet)
    assert message.parsed == Pet.model_validate_json(message.content or "")


def test_the_client_parses_a_stream_into_a_model(demo_client: openai.OpenAI) -> None:
    with demo_client.chat.completions.stream(
        model="", messages=QUESTION, response_format=Pet, seed=1, max_tokens=60
    ) as stream:
        kinds = Counter(event.type for event in stream)
        final = stream.get_final_completion()
    assert kinds["content.delta"] > 3
    assert isinstance(final.choices[0].message.parsed, Pet)


def test_a_truncated_answer_raises_in_the_client(demo_client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        demo_client.chat.completions.parse(model="", messages=QUESTION, response_format=Pet, max_tokens=3)


def test_choice_regex_and_grammar(demo_client: openai.OpenAI) -> None:
    def text(**fields: object) -> str:
        reply = demo_client.chat.completions.create(model="", messages=QUESTION, max_tokens=40, extra_body=fields)
        assert reply.choices[0].finish_reason == "stop"
        return reply.choices[0].message.content or ""

    assert text(guided_choice=["cat", "dog"]) in ("cat", "dog")
    assert text(structured_outputs={"regex": "[0-9]{3}-[0-9]{4}"})[3] == "-"
    assert text(guided_grammar='start: "A" /[a-z]{1,4}/ "!"').endswith("!")
    assert text(grammar='root ::= "it is a " ("cat" | "dog")').startswith("it is a ")
