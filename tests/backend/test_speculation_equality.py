"""Tokens with drafts, whatever they are, equal tokens without: all that a client sees but the speed."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
from millstream.backend.generation.drafters.drafter import Drafter
from millstream.engine.generation.messages import Generate, Generated
from millstream.engine.generation.scheduler import GenerationScheduler
from millstream.engine.generation.tuning import SchedulerSettings, make_scheduler
from millstream.engine.messages import Cancel, Failed
from millstream.model_facts import GenerationFacts
from millstream.models.source import ModelSource
from millstream.text.grammars.grammar import compiler_of
from millstream.types import FinishReason, Grammar, Sampling
from support.drafting import drafting
from support.engines import Driver, engine
from support.known_drafter import KnownDrafter
from support.mixed_requests import mixed, seen
from support.tiers import some
from support.tiny import FAMILIES, VOCAB, write_model, write_tokenizer

END = 258
"""The byte tokenizer's <|im_end|>."""

KINDS = ["llama", "gemma3_text", "qwen3_moe"]
"""Full attention, windows, experts."""

DRAFTS: list[tuple[float, dict[str, Any]]] = [
    (1.0, {}),
    (0.7, {"ragged": True}),
    (0.3, {"offer": 0.5}),
    (0.9, {"too_long": True}),
    (0.0, {}),
]
"""What a drafter offers: the share that is right, and its shape."""


class Drafted:
    """An engine whose backend has these drafters; remembers the backend."""

    def __init__(self, folder: Path, drafters: Sequence[Drafter] | None, **changes: Any) -> None:
        settings = GenerationSettings("folder", folder, **{"max_rows": 5, **changes})
        self._make = lambda: MlxGenerationBackend(settings, drafters)

    def __call__(self) -> MlxGenerationBackend:
        self.backend = self._make()
        return self.backend


def answers(driver: Driver, wanted: Sequence[Generate]) -> dict[int, list[int]]:
    return {submit.request_id: list(driver.tokens.get(submit.request_id, [])) for submit in wanted}


def proposed(driver: Driver, wanted: Sequence[Generate]) -> tuple[int, int]:
    """Tokens of drafts that were right, and that were wrong, by usage."""
    usages = [end.usage for each in wanted for end in driver.ends[each.request_id] if isinstance(end, Generated)]
    return sum(each.accepted_prediction_tokens for each in usages), sum(
        each.rejected_prediction_tokens for each in usages
    )


@pytest.mark.parametrize(
    ("family", "right", "shape"),
    some(
        [(family, *draft) for family in FAMILIES for draft in DRAFTS],
        [(family, *draft) for draft, family in zip([*DRAFTS, *DRAFTS[1:3]], cycle(KINDS))],
    ),
)
def test_any_drafts_give_the_same_answers(
    family: str, right: float, shape: Mapping[str, Any], tiny_model: Callable[[str], Path]
) -> None:
    """Greedy and sampled rows, penalties, minimum lengths, log-probabilities, stop tokens inside a draft."""
    folder = tiny_model(family)
    wanted = mixed(len(family) + int(10 * right), 12)
    with engine(Drafted(folder, []), prefill_tokens=16) as driver:
        expected = seen(driver, wanted, cached=False)
        known = answers(driver, wanted)
    drafter = KnownDrafter(known, right, seed=3, **shape)
    make = Drafted(folder, [drafter])
    with engine(make, make_scheduler=functools.partial(drafting, 5)) as driver:
        assert seen(driver, wanted, cached=False) == expected
        if driver.facts is not None and driver.facts.drafters:
            accepted, rejected = proposed(driver, wanted)
            assert (accepted > 5) == (right > 0) and (rejected > 5) == (right < 1)
    assert not len(drafter), "rows that have ended are forgotten"


@pytest.mark.parametrize("cache", [None, 30, 10_000])
def test_with_preemption_and_a_prefix_cache(cache: int | None, tiny_model: Callable[[str], Path]) -> None:
    """What is saved of rows, and what they start again from, holds no token of a draft that was wrong."""
    wanted = [*mixed(21, 10), *(replace(each, request_id=100 + each.request_id) for each in mixed(21, 10))]
    with engine(Drafted(tiny_model("llama"), []), prefill_tokens=16) as driver:
        expected = seen(driver, wanted, cached=False)
        known = answers(driver, wanted)
    make = Drafted(tiny_model("llama"), [KnownDrafter(known, 0.7, ragged=True)])
    schedule = functools.partial(drafting, 8, preempt=0.08, cache=cache)
    with engine(make, make_scheduler=schedule) as driver:
        assert seen(driver, wanted[:10], cached=False) == expected[:10]
        assert seen(driver, wanted[10:], cached=False) == expected[10:]
        cached = [driver.ends[each.request_id][0].usage.cached_tokens for each in wanted[10:]]  # type: ignore[union-attr]
        assert any(cached) == (cache is not None)


@pytest.mark.parametrize("family", some(["lfm2", "mamba2", "falcon_h1"], ["lfm2"]))
def test_states_are_those_after_the_tokens_that_were_kept(family: str, tiny_model: Callable[[str], Path]) -> None:
    """Recurrent layers, with checkpoints of their states in the prefix cache."""
    wanted = [*mixed(5, 8), *(replace(each, request_id=100 + each.request_id) for each in mixed(5, 8))]
    with engine(Drafted(tiny_model(family), []), prefill_tokens=16) as driver:
        expected = seen(driver, wanted, cached=False)
        known = answers(driver, wanted)
    make = Drafted(tiny_model(family), [KnownDrafter(known, 0.7, ragged=True)])
    with engine(make, make_scheduler=functools.partial(drafting, 8, cache=10_000)) as driver:
        assert seen(driver, wanted[:8], cached=False) == expected[:8]
        assert seen(driver, wanted[8:], cached=False) == expected[8:]


def test_the_next_turn_continues_where_the_last_one_ended(tiny_model: Callable[[str], Path]) -> None:
    """Passes do not turn the prefix cache off: a checkpoint of the states stands after the last token computed."""
    first = [Generate(number, tuple(range(number, number + 20)), 30) for number in range(4)]
    with engine(Drafted(tiny_model("lfm2"), []), prefill_tokens=64) as driver:
        driver.complete(*first)
        known = answers(driver, first)
    for right in (1.0, 0.6):
        make = Drafted(tiny_model("lfm2"), [KnownDrafter(known, right)])
        with engine(make, make_scheduler=functools.partial(drafting, 3, chance=1.0, cache=10_000)) as driver:
            for each in first:  # alone, so that most end with a pass
                driver.complete(each)
            assert answers(driver, first) == known
            turns = [replace(each, request_id=9 + each.request_id, prompt=then(each, known)) for each in first]
            driver.complete(*turns)
            for turn in turns:
                [end] = driver.ends[turn.request_id]
                assert isinstance(end, Generated) and end.usage.cached_tokens >= 49 - 1


def then(first: Generate, known: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
    return (*first.prompt, *known[first.request_id], 7, 8, 9)


GRAMMARS = [
    Grammar("regex", "20[0-9]{2}-(0[1-9]|1[0-2])-[0-9]{2}T[0-9]{2}:[0-9]{2}"),
    Grammar("lark", 'start: ("ab" | "c")+ "."'),
    Grammar(
        "json_schema", '{"type":"object","properties":{"a_long_key":{"type":"integer"}},"required":["a_long_key"]}'
    ),
    None,
]


@pytest.mark.parametrize("right", [None, 1.0, 0.6])
def test_grammars(right: float | None, tmp_path: Path) -> None:
    """Drafts that a grammar forbids are cut; a matcher is where its row is. None: the drafters of the server."""
    folder = write_model(tmp_path / "guided", "llama", vocab_size=259)
    write_tokenizer(folder)
    wanted = [
        Generate(
            number,
            (1, 2, 3),
            24,
            Sampling(temperature=1.0 * (number % 3 > 0), seed=number, presence_penalty=0.1 * (number % 2)),
            stop_tokens=frozenset({END}),
            grammar=GRAMMARS[number % 4],
            logprobs=1,
        )
        for number in range(16)
    ]
    grammars = compiler_of(ModelSource("tiny", "folder", folder))
    with engine(Drafted(folder, [], grammars=grammars)) as driver:
        expected = seen(driver, wanted)
        known = answers(driver, wanted)
    drafters = None if right is None else [KnownDrafter(known, right, alphabet=259)]
    with engine(Drafted(folder, drafters, grammars=grammars), make_scheduler=functools.partial(drafting, 6)) as driver:
        assert seen(driver, wanted) == expected
        assert proposed(driver, wanted)[0] > 10
    with engine(
        Drafted(folder, drafters, grammars=grammars), make_scheduler=functools.partial(drafting, 6, preempt=0.1)
    ) as driver:
        assert seen(driver, wanted) == expected


def test_cancels_and_joins_between_passes(tiny_model: Callable[[str], Path]) -> None:
    """Rows come and go while others speculate; those that stay have the tokens of undisturbed ones."""
    draw = random.Random(2)
    wanted = [
        Generate(
            number,
            tuple(draw.randrange(VOCAB) for _ in range(draw.choice([1, 5, 20]))),
            draw.choice([8, 20, 40]),
            Sampling(temperature=draw.choice([0.0, 1.0]), seed=number, frequency_penalty=draw.choice([0.0, 0.5])),
            speculate=number % 7 > 0,
        )
        for number in range(60)
    ]
    with engine(Drafted(tiny_model("llama"), []), prefill_tokens=16) as driver:
        driver.complete(*wanted)
        known = answers(driver, wanted)
    drafter = KnownDrafter(known, 0.8, ragged=True)
    with engine(Drafted(tiny_model("llama"), [drafter]), make_scheduler=functools.partial(drafting, 4)) as driver:
        cancelled = {number for number in range(60) if draw.random() < 0.3}
        for each in wanted:
            driver.post(each)
            if draw.random() < 0.5:
                time.sleep(draw.uniform(0, 0.02))
            for number in [number for number in cancelled if number < each.request_id - 2]:
                driver.post(Cancel(number))
                cancelled.discard(number)
        driver.wait_ended(*(each.request_id for each in wanted))
        for each in wanted:
            tokens = driver.tokens.get(each.request_id, [])
            [end] = driver.ends[each.request_id]
            assert isinstance(end, Generated)
            assert tokens == known[each.request_id][: len(tokens)]
            assert end.reason is FinishReason.CANCELLED or tokens == known[each.request_id]
            assert each.speculate or not end.usage.accepted_prediction_tokens + end.usage.rejected_prediction_tokens
    assert not len(drafter), "rows that have ended are forgotten"


def test_a_failed_pass_leaves_nothing_behind(tiny_model: Callable[[str], Path]) -> None:
    """The step fails between launch and read; the next requests run as on a fresh engine."""
    wanted = [Generate(number, (number + 1, 2, 3), 20) for number in range(6)]
    with engine(Drafted(tiny_model("llama"), []), prefill_tokens=16) as driver:
        driver.complete(*wanted)
        known = answers(driver, wanted)
    known |= {100 + number: tokens for number, tokens in known.items()}

    class Failing(KnownDrafter):
        broken = True

        def propose(self, asked: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
            if self.broken and any(self.gained.get(row, 0) > 8 for row in asked):
                self.broken = False
                raise RuntimeError("a drafter that fails")
            return super().propose(asked)

    drafter = Failing(known, 0.8)
    with engine(Drafted(tiny_model("llama"), [drafter]), make_scheduler=functools.partial(drafting, 4)) as driver:
        driver.complete(*wanted)
        failed = {each.request_id for each in wanted if isinstance(driver.ends[each.request_id][0], Failed)}
        assert failed
        again = [replace(each, request_id=100 + each.request_id) for each in wanted]
        driver.complete(*again)
        assert answers(driver, again) == {each.request_id: known[each.request_id] for each in again}
    assert failed.isdisjoint(drafter.gained), "those of the failed step are forgotten"


def test_the_scheduler_speculates_by_itself_where_it_pays(tiny_model: Callable[[str], Path]) -> None:
    """As the server is set up: its drafters, odds learned from steps. Answers are the same, and figures are kept."""
    wanted = [Generate(number, (5, 6, 7, 8) * 6, 60, prediction=()) for number in range(3)]
    with engine(Drafted(tiny_model("llama"), []), make_scheduler=tuned) as driver:
        driver.complete(*wanted)
        known = answers(driver, wanted)
        assert driver.measured.speculated is None
    predicted = [replace(each, prediction=tuple(known[each.request_id])) for each in wanted]
    with engine(Drafted(tiny_model("llama"), None), make_scheduler=tuned) as driver:
        assert driver.facts is not None and driver.facts.drafters == ("grammar", "prediction", "prompt-lookup")
        driver.complete(*predicted)
        assert answers(driver, predicted) == known
        assert driver.measured.speculated is not None
        accepted, rejected = proposed(driver, predicted)
    counts = [(proposed, right) for _, proposed, right in driver.measured.speculated.drafters]
    assert sum(right for _, right in counts) >= accepted
    assert sum(count - right for count, right in counts) <= rejected


def tuned(facts: GenerationFacts) -> GenerationScheduler:
    return make_scheduler(SchedulerSettings(), facts)
