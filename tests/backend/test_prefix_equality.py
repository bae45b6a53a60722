"""What is kept of earlier prompts changes no answer: conversations that branch, repeat and go on, in full batches."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from millstream.backend.text_model import MlxTextBackend, TextModelSettings
from millstream.engine.backend import Plan, StepResult
from millstream.engine.keeper import Keeper, StateKeeper
from millstream.engine.link import ThreadLink
from millstream.engine.messages import Finished, Forget, Submit
from millstream.engine.prefix import PrefixIndex
from millstream.engine.scheduler import Scheduler
from millstream.types import ModelFacts
from support.engines import Driver, engine
from support.tiny import FAMILIES

ROWS = 4
BLOCK = 4
VOCAB = 90


def with_keeper(budget: int, facts: ModelFacts) -> Scheduler:
    assert facts.keeps is not None
    states = bool(facts.keeps.states)
    index = PrefixIndex(block=BLOCK, block_bytes=1, budget=budget, from_states=states)
    keeper = StateKeeper(index, lambda tokens: 1) if states else Keeper(index)
    return Scheduler(max_rows=facts.max_rows, prefill_tokens=7, keeper=keeper)


def conversations(seed: int, count: int) -> list[tuple[int, ...]]:
    """Prompts of which many begin as another: exact repeats, one more token, cut off, branched, continued, fresh."""
    draw = random.Random(seed)
    fresh = lambda: tuple(draw.randrange(1, VOCAB) for _ in range(draw.randrange(1, 40)))  # noqa: E731
    system = tuple(draw.randrange(1, VOCAB) for _ in range(21))
    known = [system + fresh()]
    for _ in range(count):
        old = draw.choice(known)
        known.append(
            draw.choice((
                old,
                (*old, draw.randrange(1, VOCAB)),
                old[: draw.randrange(1, len(old) + 1)],
                old[: draw.randrange(1, len(old) + 1)] + fresh(),
                (old + fresh())[:120],
                system + fresh(),
                fresh(),
            ))
        )  # fmt: skip
    return known


@pytest.mark.parametrize("like_gpu", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [1000, 12])
def test_kept_beginnings_change_no_token(
    family: str, budget: int, like_gpu: bool, tiny_model: Callable[[str], Path]
) -> None:
    settings = TextModelSettings("folder", tiny_model(family), max_rows=ROWS, like_gpu=like_gpu)
    make = functools.partial(MlxTextBackend, settings)
    submits = [Submit(number, prompt, 6) for number, prompt in enumerate(conversations(len(family) + budget, 60))]
    with engine(make) as plain:
        expected = plain.run(*submits)
    driver = Driver(ThreadLink("kept", make, functools.partial(with_keeper, budget)))
    driver.start()
    try:
        assert driver.run(*submits) == expected
        again = [Submit(1000 + number, submit.prompt, 6) for number, submit in enumerate(submits)]
        assert driver.run(*again) == expected, "warm"
        ends = [driver.ends[submit.request_id][0] for submit in again]
    finally:
        driver.stop()
    cached = [end.usage.cached_tokens for end in ends if isinstance(end, Finished)]
    assert len(cached) == len(submits)
    whole = [(len(submit.prompt) - 1) // BLOCK * BLOCK for submit in submits]
    if budget == 1000:
        assert cached == whole, "everything that was read once is found"
    else:
        assert sum(cached) > 0
        assert all(found <= most for found, most in zip(cached, whole, strict=True))


def test_the_next_turn_finds_the_last_answer(tiny_model: Callable[[str], Path]) -> None:
    make = functools.partial(MlxTextBackend, TextModelSettings("folder", tiny_model("llama"), max_rows=ROWS))
    driver = Driver(ThreadLink("kept", make, functools.partial(with_keeper, 1000)))
    driver.start()
    try:
        [answer] = driver.run(Submit(1, tuple(range(1, 11)), 12))
        driver.run(Submit(2, (*range(1, 11), *answer, 77, 78), 3))
        end = driver.ends[2][0]
    finally:
        driver.stop()
    assert isinstance(end, Finished)
    assert end.usage.cached_tokens == 20, "10 of the prompt and 11 of the answer, in whole blocks"


def test_what_is_forgotten_is_read_again(tiny_model: Callable[[str], Path]) -> None:
    make = functools.partial(MlxTextBackend, TextModelSettings("folder", tiny_model("llama"), max_rows=ROWS))
    driver = Driver(ThreadLink("kept", make, functools.partial(with_keeper, 1000)))
    driver.start()
    try:
        prompt = tuple(range(1, 30))
        answers = driver.run(Submit(1, prompt, 5))
        driver.post(Forget())
        assert driver.run(Submit(2, prompt, 5)) == answers
        assert driver.run(Submit(3, prompt, 5)) == answers
        ends = [driver.ends[number][0] for number in (2, 3)]
    finally:
        driver.stop()
    assert [end.usage.cached_tokens for end in ends if isinstance(end, Finished)] == [0, 28]


class Failing(MlxTextBackend):
    """A step fails when told to."""

    fail = False

    def step(self, plan: Plan) -> StepResult:
        if Failing.fail and plan.decode:
            Failing.fail = False
            raise ValueError("told to fail")
        return super().step(plan)


def test_after_a_failed_step_nothing_is_believed_to_be_kept(tiny_model: Callable[[str], Path]) -> None:
    make = functools.partial(Failing, TextModelSettings("folder", tiny_model("llama"), max_rows=ROWS))
    driver = Driver(ThreadLink("kept", make, functools.partial(with_keeper, 1000)))
    driver.start()
    try:
        prompt = tuple(range(1, 30))
        [expected] = driver.run(Submit(1, prompt, 5))
        Failing.fail = True
        driver.run(Submit(2, prompt, 5))
        assert driver.run(Submit(3, prompt, 5)) == [expected]
        assert driver.run(Submit(4, prompt, 5)) == [expected]
        ends = [driver.ends[number][0] for number in (3, 4)]
    finally:
        driver.stop()
    assert [end.usage.cached_tokens for end in ends if isinstance(end, Finished)] == [0, 28]
