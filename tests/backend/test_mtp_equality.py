"""Answers with a head's drafts equal answers without: rows that join, are cancelled and are preempted, any seed."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
from millstream.engine.generation.messages import Generate, Generated
from millstream.engine.messages import Cancel
from millstream.types import Sampling
from support.drafting import drafting
from support.engines import engine
from support.mtp_models import sentences, trained_folder, write_published

ROWS = 4


@pytest.fixture(scope="module")
def trained() -> Path:
    return trained_folder()


def mixed_sentences(draw: random.Random, count: int) -> list[Generate]:
    """Prompts of the text that the model knows, some with the same beginning; greedy, sampled, penalised."""
    texts = sentences(draw.randrange(1000), 4, 60)
    found = []
    for number in range(count):
        sampling = Sampling(
            temperature=draw.choice([0.0, 0.7, 1.2]),
            top_p=draw.choice([1.0, 0.9]),
            seed=draw.randrange(2**40),
            repetition_penalty=draw.choice([1.0, 1.0, 1.2]),
            logit_bias=draw.choice([(), ((5, -4.0), (9, 3.0))]),
        )
        found.append(
            Generate(
                number,
                tuple(draw.choice(texts)[: draw.choice([1, 2, 20, 50])]),
                draw.choice([1, 2, 12, 30]),
                sampling,
                stop_tokens=draw.choice([frozenset(), frozenset({7, 21})]),
                min_tokens=draw.choice([0, 8]),
                logprobs=draw.choice([None, 1]),
            )
        )
    return found


def backend(folder: Path, **changes: Any) -> MlxGenerationBackend:
    return MlxGenerationBackend(GenerationSettings("folder", folder, **{"max_rows": ROWS, **changes}))


class Listening:
    """Makes a backend, and counts the tokens that its head drafts."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self._make = functools.partial(backend, folder, **changes)
        self.proposed = 0

    def __call__(self) -> MlxGenerationBackend:
        self._backend = self._make()
        return self._backend

    def listen(self) -> None:
        """Once the model is loaded."""
        loaded = self._backend._loaded
        assert loaded is not None and loaded.assembly.mtp is not None
        mtp = loaded.assembly.mtp
        propose = mtp.propose

        def counted(wanted: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
            found = propose(wanted)
            self.proposed += sum(map(len, found.values()))
            return found

        mtp.propose = counted  # type: ignore[method-assign]


def check(folder: Path, seed: int, *, preempt: float, cache: int | None, like_gpu: bool) -> tuple[int, int]:
    """Returns how many tokens the head drafted, and how many of all drafts were right."""
    draw = random.Random(seed)
    wanted = mixed_sentences(draw, 10)
    with engine(lambda: backend(folder, speculation=False)) as driver:
        driver.complete(*wanted)
        expected = {each.request_id: driver.tokens.get(each.request_id, []) for each in wanted}
    make = functools.partial(drafting, seed, preempt=preempt, cache=cache)
    listening = Listening(folder, like_gpu=like_gpu)
    accepted = 0
    with engine(listening, make_scheduler=make) as driver:
        assert driver.facts is not None and "mtp" in driver.facts.drafters
        listening.listen()
        cancelled = {each.request_id for each in draw.sample(wanted, 2)}
        for each in wanted:
            driver.post(each)
            for other in cancelled & {each.request_id - 3}:
                driver.wait(lambda other=other: bool(driver.tokens.get(other)) or other in driver.ends)  # type: ignore[misc]
                driver.post(Cancel(other))
        driver.wait_ended(*expected)
        for request_id, answer in expected.items():
            got = driver.tokens.get(request_id, [])
            [end] = driver.ends[request_id]
            if request_id in cancelled:
                assert got == answer[: len(got)]
            else:
                assert isinstance(end, Generated) and got == answer
                accepted += end.usage.accepted_prediction_tokens
    return listening.proposed, accepted


@given(
    seed=st.integers(0, 2**32),
    preempt=st.sampled_from([0.0, 0.1]),
    cache=st.sampled_from([None, 40]),
    gpu=st.booleans(),
)
@example(seed=1, preempt=0.0, cache=None, gpu=False)
@example(seed=2, preempt=0.1, cache=40, gpu=True)
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_same_answers(seed: int, preempt: float, cache: int | None, gpu: bool, trained: Path) -> None:
    proposed, accepted = check(trained, seed, preempt=preempt, cache=cache, like_gpu=gpu)
    if seed < 3:  # what others draw may be hard to guess
        assert proposed > 50 and accepted > proposed / 10


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_5"])
def test_published_layouts_give_the_same_answers(family: str, tmp_path: Path) -> None:
    """Random weights: hardly any draft is right."""
    proposed, _ = check(write_published(tmp_path / family, family), 4, preempt=0.05, cache=40, like_gpu=False)
    assert proposed > 20


def test_speculation_off_loads_no_head(trained: Path) -> None:
    with engine(lambda: backend(trained, speculation=False)) as driver:
        without = driver.facts
    with engine(lambda: backend(trained)) as driver:
        facts = driver.facts
    assert without is not None and facts is not None
    assert without.drafters == () and "mtp" in facts.drafters
    assert facts.weight_bytes > without.weight_bytes
    assert any(note.startswith("MTP head: ") for note in facts.notes)
