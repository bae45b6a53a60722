"""What decode steps and prefill passes are believed to cost, and how many short prompts share a pass."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.engine.generation.decode_cost import DecodeCost
from millstream.engine.generation.pass_cost import LEAST_FACTOR, PassCost
from millstream.engine.generation.short_prompts import CROWD, MOST_PARTS, STRETCH, ShortPrompts

FLAT = [(64, 0.014), (256, 0.034), (512, 0.033), (1024, 0.044), (2048, 0.065)]


def test_what_a_step_costs_is_known_for_rows_that_have_not_run() -> None:
    cost = DecodeCost([(1, 0.005), (4, 0.0052), (16, 0.0064)])
    assert [cost.seconds(rows) for rows in (1, 4, 10, 16, 28)] == pytest.approx([0.005, 0.0052, 0.0058, 0.0064, 0.0076])
    for _ in range(100):
        cost.observe(4, 0.0104)
    assert cost.seconds(16) == pytest.approx(0.0128, rel=1e-3), "the device is twice as slow as at load"


def test_more_rows_never_cost_less() -> None:
    cost = DecodeCost([(1, 0.005), (4, 0.004), (16, 0.006)])
    found = [cost.seconds(rows) or 0.0 for rows in range(1, 65)]
    assert found == sorted(found)


def test_without_a_calibration_all_steps_count_as_one() -> None:
    cost = DecodeCost()
    assert cost.seconds(8) is None and not cost.known
    cost.observe(8, 0.01)
    assert cost.seconds(1) == cost.seconds(64) == 0.01


def test_one_slow_step_says_nothing() -> None:
    """It waited for a pass that was launched before it."""
    cost = DecodeCost([(1, 0.005), (16, 0.006)])
    for seconds in (0.006, 0.006, 0.06, 0.006):
        cost.observe(16, seconds)
    assert cost.seconds(16) == pytest.approx(0.006)


def test_a_load_that_measured_too_little_is_corrected_within_a_few_steps() -> None:
    cost = DecodeCost([(1, 0.003)])
    for _ in range(5):
        cost.observe(32, 0.006)
    assert cost.seconds(32) == pytest.approx(0.006, rel=0.1)
    assert cost.seconds(64) == pytest.approx(0.006, rel=0.1), "fewer rows say more than nothing"
    cost.observe(1, 0.003)
    assert (cost.seconds(1) or 0.0) < (cost.seconds(32) or 0.0)


def test_passes_cost_what_chunks_did_and_longer_ones_never_less() -> None:
    cost = PassCost(FLAT)
    assert cost.seconds(64) == cost.seconds(1) == 0.014
    assert cost.seconds(256) == cost.seconds(512) == 0.033, "what seemed dearer was disturbed"
    assert cost.seconds(1536) == pytest.approx(0.0545)
    assert cost.seconds(4096) == pytest.approx(0.065 * 2)
    assert not PassCost().known


@given(seconds=st.floats(0.001, 0.5))
def test_tokens_for_a_time_cost_that_time(seconds: float) -> None:
    cost = PassCost(FLAT)
    tokens = cost.tokens_in(seconds)
    assert tokens == 0 or cost.seconds(tokens) <= seconds * 1.0001
    assert cost.seconds(tokens + 2) > seconds * 0.9999


def observe(cost: PassCost, tokens: int, added: float, parts: int = 4) -> None:
    """A pass over some steps, and the two steps after it, of 5 ms each."""
    cost.observe(tokens=tokens, seconds=0.005, decode=0.005, prefilling=True)
    for part in range(parts):
        cost.observe(tokens=0, seconds=0.005 + added / parts, decode=0.005, prefilling=part < parts - 1)
    for _ in range(2):
        cost.observe(tokens=0, seconds=0.005, decode=0.005, prefilling=False)


def test_passes_that_take_longer_beside_rows_are_planned_so() -> None:
    cost = PassCost(FLAT)
    for _ in range(20):
        observe(cost, 1024, 0.088)
    assert cost.seconds(1024) == pytest.approx(0.088, rel=0.05)
    assert cost.seconds(64) == pytest.approx(0.028, rel=0.05)


def test_one_slow_pass_says_nothing() -> None:
    cost = PassCost(FLAT)
    observe(cost, 1024, 0.4)
    assert cost.seconds(1024) == pytest.approx(0.044)


def test_a_pass_that_hides_behind_the_rows_is_not_believed_to_be_free() -> None:
    cost = PassCost(FLAT)
    for _ in range(50):
        observe(cost, 64, 0.0)
    assert cost.seconds(2048) >= LEAST_FACTOR * 0.065 - 1e-9


def test_passes_that_follow_each_other_count_together() -> None:
    """What the first one costs shows while the second one is launched."""
    apart, together = PassCost(FLAT), PassCost(FLAT)
    for _ in range(10):
        observe(apart, 1024, 0.088)
        for tokens, seconds in ((1024, 0.005), (1024, 0.03), (0, 0.08), (0, 0.081)):
            together.observe(tokens=tokens, seconds=seconds, decode=0.005, prefilling=False)
    assert together.seconds(1024) == pytest.approx(apart.seconds(1024), rel=0.05)


def test_work_of_another_kind_is_not_counted() -> None:
    cost = PassCost(FLAT)
    for _ in range(5):
        cost.observe(tokens=1024, seconds=0.9, decode=0.005, prefilling=True)
        cost.forget()
        cost.observe(tokens=0, seconds=0.9, decode=0.005, prefilling=False)
    assert cost.seconds(1024) == 0.044


def short_prompts(decode: float = 0.008, most_tokens: int = 8192) -> ShortPrompts:
    return ShortPrompts(DecodeCost([(1, decode)]), PassCost(FLAT), max_gap=0.05, most_tokens=most_tokens)


def test_prompts_that_are_many_against_the_rows_share_one_step() -> None:
    chosen = short_prompts().choose([80] * 8, rows=2)
    assert (chosen.count, chosen.parts) == (8, 0)
    few = short_prompts().choose([80] * 8, rows=8)
    assert few.count == 8 and few.parts > 1


def test_a_step_that_computes_a_pass_keeps_the_longest_gap() -> None:
    chosen = short_prompts().choose([80] * 64, rows=2)
    assert chosen.parts == 0
    assert 0 < chosen.count < 64
    assert 0.008 + PassCost(FLAT).seconds(80 * chosen.count) <= 0.05


@given(
    decode=st.floats(0.001, 0.019),
    rows=st.integers(1, 256),
    lengths=st.lists(st.integers(0, 512), min_size=1, max_size=64),
    pace=st.sampled_from([0.0, 1e3, 1e6]),
)
def test_no_step_is_longer_than_it_may_be(decode: float, rows: int, lengths: list[int], pace: float) -> None:
    passes = PassCost(FLAT)
    chosen = short_prompts(decode).choose(lengths, rows, pace)
    assert 0 <= chosen.count <= len(lengths) and 0 <= chosen.parts <= MOST_PARTS
    if not chosen.count:
        assert MOST_PARTS * (0.05 - decode) < passes.seconds(512), "there was room for one"
        return
    added = passes.seconds(sum(lengths[: chosen.count])) / max(1, chosen.parts)
    assert decode + added <= 0.05
    if not pace and chosen.parts and chosen.count > 1 and decode > 0.005:
        assert decode + added <= STRETCH * decode * 1.001
    if not chosen.parts and added > (STRETCH - 1) * decode:
        assert len(lengths) >= CROWD * rows


def test_prompts_gather_while_others_come() -> None:
    subject = short_prompts()
    assert subject.gathers(10, 32, waited=0.01, since_last=0.0)
    assert not subject.gathers(10, 32, waited=0.01, since_last=0.03), "nobody comes any more"
    assert not subject.gathers(10, 32, waited=0.09, since_last=0.0), "long enough"
    assert not subject.gathers(2, 32, waited=0.0, since_last=0.0), "too few to be a start of many streams"
    assert not subject.gathers(64, 32, waited=0.0, since_last=0.0), "enough"
