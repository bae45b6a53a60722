"""The demo model over HTTP with the official client: the first requests of a new user."""

from __future__ import annotations

import asyncio
import math

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from support.server import RunningServer
from support.tiers import some, whole

MODEL = "smollm2-135m-instruct"
FRANCE: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
STORY: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Tell me a short story about a mill."}]


def ask(client: openai.OpenAI, messages: list[ChatCompletionMessageParam] = FRANCE, **settings: object) -> str:
    settings.setdefault("temperature", 0)
    reply = client.chat.completions.create(model=MODEL, messages=messages, **settings)  # type: ignore[call-overload]
    content = reply.choices[0].message.content
    assert isinstance(content, str)
    return content


def test_it_knows_the_capital_of_france(demo_client: openai.OpenAI) -> None:
    reply = demo_client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0)
    assert "Paris" in (reply.choices[0].message.content or "")
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_a_stream_says_the_same_in_pieces(demo_client: openai.OpenAI) -> None:
    whole = ask(demo_client, STORY, max_tokens=16)
    with demo_client.chat.completions.create(
        model=MODEL,
        messages=STORY,
        temperature=0,
        max_tokens=16,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)
    pieces = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(pieces) == whole
    assert len([piece for piece in pieces if piece]) > 5
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 16


def test_the_async_client_and_many_at_once(demo: RunningServer, demo_client: openai.OpenAI) -> None:
    """Ten different questions over eight rows: each gets the answer that it gets alone."""
    questions: list[list[ChatCompletionMessageParam]] = [
        [{"role": "user", "content": f"Write the number {number} in words."}] for number in range(10)
    ]
    alone = [ask(demo_client, question, max_tokens=3) for question in questions]

    async def together() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0) as client:
            replies = await asyncio.gather(
                *(
                    client.chat.completions.create(model=MODEL, messages=question, temperature=0, max_tokens=3)
                    for question in questions
                )
            )
        return [reply.choices[0].message.content or "" for reply in replies]

    assert asyncio.run(together()) == alone


@whole
def test_a_seed_gives_the_same_text_alone_and_in_company(demo: RunningServer, demo_client: openai.OpenAI) -> None:
    settings = {"temperature": 1.0, "top_p": 0.9, "seed": 42, "max_tokens": 12}
    alone = ask(demo_client, STORY, **settings)
    assert ask(demo_client, STORY, **settings) == alone
    assert ask(demo_client, STORY, **{**settings, "seed": 43}) != alone

    async def in_a_batch() -> str:
        async with openai.AsyncOpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0) as client:
            others = [
                client.chat.completions.create(
                    model=MODEL, messages=FRANCE, temperature=0.5 * number, max_tokens=4 + 3 * number, seed=number
                )
                for number in range(4)
            ]
            seeded = client.chat.completions.create(model=MODEL, messages=STORY, **settings)  # type: ignore[call-overload]
            *_, reply = await asyncio.gather(*others, seeded)
        return str(reply.choices[0].message.content)

    assert asyncio.run(in_a_batch()) == alone


@pytest.mark.parametrize("stop", some(["capital of Fr", "is P", ["zzz", " of"], "Paris."], ["is P", ["zzz", " of"]]))
def test_a_stop_string_split_over_tokens_is_found_and_never_leaks(
    demo_client: openai.OpenAI, stop: str | list[str]
) -> None:
    whole = ask(demo_client)
    stops = [stop] if isinstance(stop, str) else stop
    expected = whole[: min(whole.index(item) for item in stops if item in whole)]
    assert ask(demo_client, stop=stop) == expected
    with demo_client.chat.completions.create(
        model=MODEL, messages=FRANCE, temperature=0, stop=stop, stream=True
    ) as stream:
        choices = [choice for chunk in stream for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == expected
    assert choices[-1].finish_reason == "stop"


def test_one_token(demo_client: openai.OpenAI) -> None:
    reply = demo_client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, max_tokens=1)
    assert reply.choices[0].message.content == "The"
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 1


def test_several_answers_to_one_question(demo_client: openai.OpenAI) -> None:
    settings = {"model": MODEL, "messages": STORY, "n": 3, "temperature": 1.2, "seed": 7, "max_tokens": 6}
    first = demo_client.chat.completions.create(**settings)  # type: ignore[call-overload]
    again = demo_client.chat.completions.create(**settings)  # type: ignore[call-overload]
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert [choice.message.content for choice in again.choices] == texts
    assert first.usage.completion_tokens == 18


def test_log_probabilities_match_the_text(demo_client: openai.OpenAI) -> None:
    reply = demo_client.chat.completions.create(
        model=MODEL, messages=FRANCE, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    text = b"".join(bytes(entry.bytes or []) for entry in logprobs.content).decode()
    assert text == reply.choices[0].message.content
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob), (
            "at temperature 0 the likeliest token is sampled"
        )
        assert sum(math.exp(other.logprob) for other in entry.top_logprobs) <= 1 + 1e-5


def test_completions_accept_text_lists_and_tokens(demo_client: openai.OpenAI) -> None:
    def complete(prompt: object) -> list[str]:
        reply = demo_client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=6)  # type: ignore[arg-type]
        return [choice.text for choice in reply.choices]

    [paris] = complete("The capital of France is")
    assert paris.startswith(" Paris")
    [three] = complete("One, two,")
    assert complete(["The capital of France is", "One, two,"]) == [paris, three]
    [from_tokens] = complete([504, 3575, 282, 4649, 314])
    assert from_tokens == paris
    assert complete([[504, 3575, 282, 4649, 314], [504, 3575, 282, 4649, 314]]) == [paris, paris]


def test_a_multi_byte_character_split_over_tokens_arrives_whole(demo_client: openai.OpenAI) -> None:
    """An emoji takes several of this model's tokens, and a prompt of emojis makes it generate more."""
    reply = demo_client.completions.create(
        model=MODEL, prompt="🦙🦙🦙🦙🦙🦙🦙🦙", temperature=0, max_tokens=12, stream=True
    )
    with reply as stream:
        pieces = [choice.text for chunk in stream for choice in chunk.choices]
    text = "".join(pieces)
    assert "🦙" in text
    assert "\ufffd" not in "".join(pieces[:-1]), "only a truncated answer may end in an incomplete character"


@whole
def test_penalties_and_bias_change_the_text(demo_client: openai.OpenAI) -> None:
    plain = ask(demo_client, STORY, max_tokens=14)
    assert ask(demo_client, STORY, max_tokens=14, frequency_penalty=2.0, presence_penalty=2.0) != plain
    assert ask(demo_client, STORY, max_tokens=14, extra_body={"repetition_penalty": 1.5}) != plain
    first = ask(demo_client, max_tokens=1, extra_body={"logit_bias": {"504": -100}})
    assert first != ask(demo_client, max_tokens=1)


def test_ignore_eos_generates_up_to_max_tokens(demo_client: openai.OpenAI) -> None:
    reply = demo_client.chat.completions.create(
        model=MODEL, messages=FRANCE, temperature=0, max_tokens=14, extra_body={"ignore_eos": True}
    )
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 14


def test_models_are_listed(demo_client: openai.OpenAI) -> None:
    assert [model.id for model in demo_client.models.list()] == [MODEL]
    assert demo_client.models.retrieve(MODEL).id == MODEL
