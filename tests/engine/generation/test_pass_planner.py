"""Prompts that share passes from any offset, in simulated time: how many share one, and how long it may take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from millstream.engine.generation.messages import Generate, Tokens
from millstream.engine.generation.pass_planner import ReadCost
from millstream.engine.generation.plan import Plan, RowOutput, StepResult
from millstream.engine.generation.tuning import SchedulerSettings, make_scheduler
from millstream.engine.messages import expanded
from millstream.model_facts import Calibration, GenerationFacts

LENGTHS = tuple(2**power for power in range(5, 13))
Cost = Callable[[int, int], float]
"""Seconds of a pass over so many prompts of so many tokens."""

COLUMNS: Cost = lambda prompts, tokens: 0.004 + 1e-4 * tokens + 1e-6 * prompts * tokens  # noqa: E731
"""A gated delta net on a GPU: each column is a few launches, for however many prompts."""
MATMULS: Cost = lambda prompts, tokens: 0.005 + 8e-6 * prompts * tokens  # noqa: E731
"""A large model on a GPU."""
SLOW: Cost = lambda prompts, tokens: 0.03 + 2e-3 * prompts * tokens  # noqa: E731
"""A laptop."""


def measured(cost: Cost, decode: float) -> Calibration:
    chunks = tuple((tokens, cost(1, tokens)) for tokens in LENGTHS if cost(1, tokens) < 1.0)
    return Calibration(chunks, ((1, decode), (16, decode)), together=(8, 512, cost(8, 512)))


@dataclass
class Found:
    firsts: dict[int, float]
    gaps: list[float]
    passes: int
    seconds: float


def play(cost: Cost, arrivals: dict[int, tuple[float, int]], *, decode: float = 0.008, tokens: int = 32) -> Found:
    """`arrivals`: by number, when and with how many tokens."""
    facts = GenerationFacts(
        2**20, 2048, 64, 2**31, "none", "gpu (simulated)", calibration=measured(cost, decode), shares_passes=True
    )
    scheduler = make_scheduler(SchedulerSettings(), facts)
    found, clock, last = Found({}, [], 0, 0.0), 0.0, {}
    coming = sorted(arrivals.items(), key=lambda item: item[1][0])
    read: tuple[int, ...] = ()
    while coming or not scheduler.idle:
        while coming and coming[0][1][0] <= clock:
            number, (_, length) = coming.pop(0)
            scheduler.submit(Generate(number, tuple(range(length)), tokens if number else 400))
        if scheduler.idle:
            clock = coming[0][1][0]
            continue
        plan: Plan = scheduler.plan()
        seconds = decode if plan.decode else 0.0
        if plan.prefill:
            found.passes += 1
            seconds += cost(len(plan.prefill), max(chunk.end - chunk.start for chunk in plan.prefill))
        clock += max(seconds, 1e-4)
        rows = tuple(RowOutput(number, (1,)) for number in read if number in plan.decode)
        read = plan.decode
        for event in expanded(scheduler.advance(plan, StepResult(rows), seconds)):
            if isinstance(event, Tokens):
                number = event.request_id
                if number in last:
                    found.gaps.append(clock - last[number])
                found.firsts.setdefault(number, clock - arrivals[number][0])
                last[number] = clock
    found.seconds = clock
    return found


def at_once(count: int, length: int = 500) -> dict[int, tuple[float, int]]:
    return {number: (0.0 if not number else 0.01, length) for number in range(count)}


def test_prompts_that_cost_little_more_together_share_passes() -> None:
    found = play(COLUMNS, at_once(32))
    assert len(found.firsts) == 32
    assert found.passes <= 20, "one by one they would be 32 passes at least"
    assert sorted(found.firsts.values())[16] <= 0.6
    assert max(found.gaps) <= 0.05 + 1e-9, "the longest gap holds beside passes, too"


def test_prompts_that_cost_as_much_together_are_read_oldest_first() -> None:
    found = play(SLOW, dict.fromkeys(range(1, 5), (0.0, 200)), decode=0.03)
    firsts = [found.firsts[number] for number in range(1, 5)]
    assert firsts == sorted(firsts)
    assert firsts[0] <= 0.6 * firsts[-1], "the oldest does not wait for the others"


def test_a_long_prompt_beside_rows_keeps_the_longest_gap_and_lets_short_ones_pass() -> None:
    arrivals = {0: (0.0, 20), 1: (0.2, 16_000), 2: (0.25, 100)}
    found = play(MATMULS, arrivals)
    assert max(found.gaps) <= 0.05 + 1e-9
    assert found.firsts[2] <= 0.3
    assert found.firsts[1] > found.firsts[2]


def test_every_prompt_answers_even_where_no_pass_fits_the_gap() -> None:
    found = play(SLOW, at_once(6, 120), decode=0.06, tokens=4)
    assert len(found.firsts) == 6


@pytest.mark.parametrize("cost", [COLUMNS, MATMULS, SLOW])
def test_what_further_prompts_cost_is_as_measured(cost: Cost) -> None:
    model = ReadCost(measured(cost, 0.01))
    for prompts, tokens in ((1, 64), (4, 256), (8, 512)):
        assert model.seconds(prompts, tokens) == pytest.approx(cost(prompts, tokens), rel=0.35)
