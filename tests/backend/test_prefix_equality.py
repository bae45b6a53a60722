"""The prefix cache changes no output: conversations that branch, repeat and continue, in full batches."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
from millstream.engine.generation.messages import ClearPrefixCache, Generate
from millstream.engine.generation.plan import Plan, StepResult
from millstream.engine.link import ThreadLink
from millstream.engine.messages import Finished
from millstream.engine.protocols import BackendFactory
from support.engines import Driver, engine
from support.prefix_caches import BLOCK, caching_scheduler
from support.tiers import some
from support.tiny import FAMILIES

ROWS = 4
COUNT, SOME = 60, 14
"""Prompts with `--whole`, and without."""
VOCAB = 90
KINDS = [family for family in FAMILIES if family != "qwen3_moe"]
"""Each has another kind of cache; a model with experts has that of a plain one."""


def conversations(seed: int, count: int) -> list[tuple[int, ...]]:
    """Prompts that often share a prefix: exact repeats, one more token, truncated, branched, continued, fresh."""
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


@contextmanager
def caching_engine(make: BackendFactory, budget: int, disk: Path | None = None) -> Iterator[Driver]:
    driver = Driver(ThreadLink("cached", make, functools.partial(caching_scheduler, budget, disk)))
    driver.start()
    try:
        yield driver
    finally:
        driver.stop()


def cached(driver: Driver, submits: list[Generate]) -> list[int]:
    ends = [driver.ends[submit.request_id][0] for submit in submits]
    assert all(isinstance(end, Finished) for end in ends)
    return [end.usage.cached_tokens for end in ends if isinstance(end, Finished)]


def numbered(prompts: list[tuple[int, ...]], first: int) -> list[Generate]:
    return [Generate(first + number, prompt, 6) for number, prompt in enumerate(prompts)]


def backend_of(folder: Path, *, like_gpu: bool = False) -> BackendFactory:
    return functools.partial(
        MlxGenerationBackend, GenerationSettings("folder", folder, max_rows=ROWS, like_gpu=like_gpu)
    )


@pytest.mark.parametrize(
    ("family", "budget", "like_gpu"),
    [
        *some([(family, 10_000, False) for family in FAMILIES], [(family, 10_000, False) for family in KINDS]),
        *some([(family, 30, False) for family in FAMILIES], [("gemma3_text", 30, False)]),
        *some([("llama", 10_000, True), ("llama", 30, True)], [("llama", 30, True)]),
    ],
)
def test_cached_prefixes_change_no_token(
    family: str, budget: int, like_gpu: bool, tiny_model: Callable[[str], Path], whole: bool
) -> None:
    """In memory, cold and warm, with a budget for all prompts and for few."""
    make = backend_of(tiny_model(family), like_gpu=like_gpu)
    prompts = conversations(len(family) + budget, COUNT if whole else SOME)
    with engine(make) as plain:
        expected = plain.run(*numbered(prompts, 0))
    with caching_engine(make, budget) as driver:
        assert driver.run(*numbered(prompts, 0)) == expected, "cold"
        again = numbered(prompts, 1000)
        assert driver.run(*again) == expected, "warm"
        found = cached(driver, again)
    prefilled = [(len(prompt) - 1) // BLOCK * BLOCK for prompt in prompts]
    if budget == 10_000:
        assert all(hit >= least for hit, least in zip(found, prefilled, strict=True)), "all earlier prompts are hits"
    else:
        assert sum(found) > 0


@pytest.mark.parametrize("family", some(FAMILIES, ["gemma3_text", "falcon_h1", "llama4"]))
def test_a_cached_prefix_serves_any_number_of_rows(family: str, tiny_model: Callable[[str], Path]) -> None:
    """They diverge after it by one token or more, one after the other: no row may see what another one wrote."""
    make = backend_of(tiny_model(family))
    draw = random.Random(family)
    shared = tuple(draw.randrange(1, VOCAB) for _ in range(56))
    prompts = [shared + tuple(draw.randrange(1, VOCAB) for _ in range(more)) for more in (2, 1, 2, 3, 1, 2, 9, 2)]
    with engine(make) as plain, caching_engine(make, 10_000) as driver:
        for number, prompt in enumerate(prompts):
            submit = Generate(number, prompt, 12)
            assert driver.run(submit) == plain.run(submit), f"prompt {number}"


@pytest.mark.parametrize("family", some(FAMILIES, ["gemma3_text", "mamba2"]))
def test_prefixes_from_disk_change_no_token(
    family: str, tiny_model: Callable[[str], Path], tmp_path: Path, whole: bool
) -> None:
    """One engine fills the folder; the next starts with nothing else; the last has almost no memory budget."""
    make = backend_of(tiny_model(family))
    prompts = conversations(len(family), COUNT if whole else SOME)
    with caching_engine(make, 10_000, tmp_path) as driver:
        expected = driver.run(*numbered(prompts, 0))
    with engine(make) as plain:
        assert plain.run(*numbered(prompts, 0)) == expected, "while the folder is written"
    for budget in (10_000, 40):
        with caching_engine(make, budget, tmp_path) as driver:
            submits = numbered(prompts, 0)
            assert driver.run(*submits) == expected, f"with a budget of {budget}"
            found = sum(cached(driver, submits))
        assert found > 0.8 * sum(len(prompt) - 1 - BLOCK for prompt in prompts) or budget == 40
        assert found > 0


@pytest.mark.parametrize(
    ("family", "disk"),
    [
        *some(
            [(family, False) for family in FAMILIES], [(family, False) for family in ("llama", "gemma3_text", "mamba2")]
        ),
        *some([(family, True) for family in FAMILIES], [("lfm2", True)]),
    ],
)
def test_conversations_continue_from_their_outputs(
    family: str, disk: bool, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Eight at a time in four rows, four turns each: every turn continues where the last output ended. With `disk`,
    each turn runs on a new engine."""
    make = backend_of(tiny_model(family))
    draw, before = random.Random(family), [0] * 8
    talks = [tuple(draw.randrange(1, VOCAB) for _ in range(draw.randrange(1, 30))) for _ in range(8)]
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(engine(make))
        driver = None if disk else stack.enter_context(caching_engine(make, 10_000))
        for turn in range(4):
            submits = [Generate(100 * turn + number, talk, 4 + number) for number, talk in enumerate(talks)]
            expected = plain.run(*submits)
            with contextlib.ExitStack() as once:
                asked = driver or once.enter_context(caching_engine(make, 10_000, tmp_path))
                assert asked.run(*submits) == expected, f"turn {turn}"
                found = cached(asked, submits)
            if turn:
                known = zip(found, before, strict=True)
                assert all(hit >= length // BLOCK * BLOCK for hit, length in known), "the last turn is no hit"
            before = [len(talk) + len(output) - 1 for talk, output in zip(talks, expected, strict=True)]
            talks = [
                (*talk, *output, *(draw.randrange(1, VOCAB) for _ in range(draw.randrange(1, 9))))
                for talk, output in zip(talks, expected, strict=True)
            ]


def test_the_next_turn_reuses_the_last_output(tiny_model: Callable[[str], Path]) -> None:
    with caching_engine(backend_of(tiny_model("llama")), 1000) as driver:
        [output] = driver.run(Generate(1, tuple(range(1, 11)), 12))
        driver.run(Generate(2, (*range(1, 11), *output, 77, 78), 3))
        end = driver.ends[2][0]
    assert isinstance(end, Finished)
    assert end.usage.cached_tokens == 20, "10 of the prompt and 11 of the output, in full blocks"


def test_a_cleared_prefix_is_prefilled_again(tiny_model: Callable[[str], Path]) -> None:
    with caching_engine(backend_of(tiny_model("llama")), 1000) as driver:
        prompt = tuple(range(1, 30))
        outputs = driver.run(Generate(1, prompt, 5))
        driver.post(ClearPrefixCache())
        assert driver.run(Generate(2, prompt, 5)) == outputs
        assert driver.run(Generate(3, prompt, 5)) == outputs
        ends = [driver.ends[number][0] for number in (2, 3)]
    assert [end.usage.cached_tokens for end in ends if isinstance(end, Finished)] == [0, 28]


class Failing(MlxGenerationBackend):
    """A step fails when told to."""

    fail = False

    def step(self, plan: Plan) -> StepResult:
        if Failing.fail and plan.decode:
            Failing.fail = False
            raise ValueError("told to fail")
        return super().step(plan)


def test_a_failed_step_clears_the_prefix_cache(tiny_model: Callable[[str], Path]) -> None:
    make = functools.partial(Failing, GenerationSettings("folder", tiny_model("llama"), max_rows=ROWS))
    with caching_engine(make, 1000) as driver:
        prompt = tuple(range(1, 30))
        [expected] = driver.run(Generate(1, prompt, 5))
        Failing.fail = True
        driver.run(Generate(2, prompt, 5))
        assert driver.run(Generate(3, prompt, 5)) == [expected]
        assert driver.run(Generate(4, prompt, 5)) == [expected]
        ends = [driver.ends[number][0] for number in (3, 4)]
    assert [end.usage.cached_tokens for end in ends if isinstance(end, Finished)] == [0, 28]
