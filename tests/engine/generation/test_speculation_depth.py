"""How deep rows speculate, in simulated time: it gains where it can and costs almost nothing where it cannot."""

from __future__ import annotations

import random

import pytest

from millstream.engine.generation.speculation.depth import SpeculationDepth


def run(rows: int, rate: float, slope: float, *, offer: float = 1.0, steps: int = 4000) -> tuple[float, list[int]]:
    """Tokens per second with speculation over those without, and the depths; `rate`: how often a token of a draft is
    right; `slope`: what each further token of a step costs, of a plain step."""
    draw = random.Random(rows * 1000 + int(100 * rate))
    depth_of = SpeculationDepth()
    seconds = tokens = 0.0
    depths = []
    for _ in range(steps):
        depth = depth_of.choose(range(rows))
        depths.append(depth)
        outcomes = {}
        for row in range(rows):
            proposed = depth if depth and draw.random() < offer else 0
            accepted = next((n for n in range(proposed) if draw.random() > rate), proposed)
            outcomes[row] = (proposed, accepted)
            tokens += 1 + accepted
        length = 1 + max(proposed for proposed, _ in outcomes.values())
        cost = 0.01 * (1 + slope * (length - 1)) * draw.uniform(0.97, 1.03)
        depth_of.observe(outcomes, length, cost)
        seconds += cost
    return tokens / seconds / (rows / 0.01), depths


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("slope", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_bad_drafts_cost_almost_nothing(rows: int, slope: float, rate: float) -> None:
    gain, depths = run(rows, rate, slope)
    assert gain > 0.98
    assert depths.count(0) > 0.8 * len(depths) or slope * 4 < rate


def test_good_drafts_pay() -> None:
    gain, depths = run(1, 0.9, 0.05)
    assert gain > 3.5
    assert depths[-1] == 8


def test_wide_steps_that_cost_much_are_left_alone() -> None:
    gain, depths = run(16, 0.6, 1.0)
    assert gain > 0.98
    assert depths.count(0) > 0.9 * len(depths)


def test_depth_follows_acceptance() -> None:
    _, shallow = run(1, 0.35, 0.1)
    _, deep = run(1, 0.95, 0.1)
    assert sum(shallow) / len(shallow) < sum(deep) / len(deep)


def test_a_text_that_begins_to_repeat_itself_is_noticed() -> None:
    draw = random.Random(3)
    depth_of = SpeculationDepth()
    depths = []
    for step in range(6000):
        rate = 0.0 if step < 2000 else 0.95
        depth = depth_of.choose([1])
        depths.append(depth)
        accepted = next((n for n in range(depth) if draw.random() > rate), depth)
        depth_of.observe({1: (depth, accepted)}, 1 + depth, 0.01 * (1 + 0.05 * depth))
    assert sum(depths[500:2000]) < 100
    assert depths[-500:].count(0) < 50


def test_nothing_is_tried_before_a_plain_step_is_known() -> None:
    assert SpeculationDepth().choose([1, 2]) == 0
    assert SpeculationDepth().choose([]) == 0
