"""Requests of all kinds, and all that clients see of their answers: the same, however rows are disturbed."""

from __future__ import annotations

import random

from millstream.engine.generation.messages import Generate, Generated, PromptLogprobs
from millstream.types import Sampling, TokenLogprob
from support.engines import Driver
from support.tiny import VOCAB


class Near(float):
    """Equals what is close to it: prefill and decode round differently. Rounded numbers would differ where one is just
    above a half and the other just below."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and abs(self - other) < 0.005

    def __ne__(self, other: object) -> bool:
        return not self == other


def mixed(seed: int, count: int) -> list[Generate]:
    """Prompts of one token to some dozens; greedy, sampled, penalised, with minimum lengths and log-probabilities."""
    draw = random.Random(seed)
    found = []
    for number in range(count):
        sampling = Sampling(
            temperature=draw.choice([0.0, 1.0]),
            top_p=draw.choice([1.0, 0.9]),
            seed=draw.randrange(2**40),
            repetition_penalty=draw.choice([1.0, 1.0, 1.3]),
            frequency_penalty=draw.choice([0.0, 0.0, 0.8]),
            presence_penalty=draw.choice([0.0, 0.0, 0.5]),
        )
        length, stops = draw.choice([1, 2, 8, 30]), frozenset(draw.sample(range(VOCAB), 12))
        found.append(
            Generate(
                number,
                tuple(draw.randrange(VOCAB) for _ in range(length)),
                draw.choice([1, 5, 12, 24]),
                sampling,
                stop_tokens=draw.choice([frozenset(), stops]),
                min_tokens=draw.choice([0, 10]),
                logprobs=draw.choice([None, 0, 2]),
                prompt_logprobs=draw.choice([None, None, 1]),
            )
        )
    return found


def seen(driver: Driver, submits: list[Generate], *, cached: bool = True) -> list[object]:
    """All that clients see."""
    driver.complete(*submits)
    found: list[object] = []
    for submit in submits:
        [end] = driver.ends[submit.request_id]
        assert isinstance(end, Generated)
        usage = (end.usage.prompt_tokens, end.usage.completion_tokens, *((end.usage.cached_tokens,) if cached else ()))
        scores = [
            readable(score)
            for event in driver.outputs.get(submit.request_id, [])
            if isinstance(event, PromptLogprobs)
            for score in event.logprobs
        ]
        logprobs = [readable(score) for score in driver.logprobs.get(submit.request_id, [])]
        found.append((driver.tokens.get(submit.request_id, []), logprobs, scores, end.reason, usage))
    return found


def readable(score: object) -> tuple[int, Near, list[int]]:
    assert isinstance(score, TokenLogprob)
    return score.token, Near(score.logprob), [token for token, _ in score.top]
