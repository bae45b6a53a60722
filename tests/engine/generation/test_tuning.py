"""How memory is divided between weights, prefix cache, rows and context; and what the scheduler gets of the tuning."""

from __future__ import annotations

import dataclasses
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.engine.generation.cost_model import tune
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import Plan, RowOutput, StepResult
from millstream.engine.generation.scheduler import GenerationScheduler
from millstream.engine.generation.tuning import (
    SchedulerSettings,
    kv_budget,
    limit_context,
    make_scheduler,
    prefix_cache_share,
)
from millstream.loading.memory import MAX_DEFAULT_CONTEXT, footprint
from millstream.model_facts import LEAST_TOKENS, Calibration, GenerationFacts, PrefixSizes
from millstream.models.estimate import Estimate

FACTS = GenerationFacts(
    8192, 1000, 8, 10_000_000, "float32", "cpu (test)", prefix_sizes=PrefixSizes(1000), kv_bytes_per_token=1000
)
MEASURED = Calibration(
    chunks=tuple((tokens, 0.005 + 1e-5 * tokens) for tokens in (16, 64, 256, 512, 1024, 2048)),
    steps=((1, 0.002),),
    save_seconds=0.0005,
)
CALIBRATED = dataclasses.replace(FACTS, calibration=MEASURED)


def test_without_a_budget_nothing_is_limited() -> None:
    assert limit_context(FACTS, None, 2**30) is FACTS
    assert prefix_cache_share(FACTS, None, 2**30) == 2**30
    assert prefix_cache_share(dataclasses.replace(FACTS, prefix_sizes=None), None, 2**30) == 0


def test_without_a_budget_the_device_is_the_bound() -> None:
    """The context is cut only if one row of it does not fit."""
    large = dataclasses.replace(FACTS, device_memory=100_000_000)
    assert limit_context(large, None, 0) is large
    assert large.tokens_in(None) == 80_000, "a tenth is left, and the weights count"
    assert prefix_cache_share(large, None, 2**30) == 20_000_000, "a quarter of what is left"
    assert prefix_cache_share(large, None, None) == 20_000_000, "less than the usual size"
    huge = dataclasses.replace(FACTS, device_memory=150 * 2**30)
    assert 16 * 2**30 < prefix_cache_share(huge, None, None) < 17 * 2**30, "an eighth: agents have long conversations"
    assert prefix_cache_share(FACTS, None, None) == 2**30, "nothing is known of the device"
    assert dataclasses.replace(large, workspace_bytes=10**6, feature_bytes=2 * 10**6).tokens_in(None) == 77_000
    small = limit_context(dataclasses.replace(FACTS, device_memory=20_000_000), None, 0)
    assert 2048 < small.context_length < 8192
    assert "the memory of this device" in small.notes[-1] and "own limit is 8192" in small.context_reason


def test_recurrent_states_of_all_rows_are_subtracted() -> None:
    states = PrefixSizes(1000, states=((1, 50_000), (4096, 1000)))
    facts = dataclasses.replace(FACTS, prefix_sizes=states)
    assert facts.tokens_in(20_000_000) == 10_000 - 8 * 50


@pytest.mark.parametrize("layout", ["classes", "rectangle"])
@given(granted=st.integers(10_000_000, 60_000_000), asked=st.integers(0, 50_000_000))
def test_weights_prefix_cache_and_one_row_fit_the_granted_memory(
    layout: Literal["classes", "rectangle"], granted: int, asked: int
) -> None:
    model = dataclasses.replace(FACTS, kv_layout=layout)
    share = prefix_cache_share(model, granted, asked)
    facts = limit_context(model, granted, asked)
    assert 0 <= share <= asked
    assert facts.context_length <= FACTS.context_length
    row = facts.context_length * facts.kv_bytes_per_token
    if facts.context_length > LEAST_TOKENS:
        assert facts.weight_bytes + share + row <= granted
    if facts.context_length < FACTS.context_length:
        assert "--memory" in facts.notes[-1]


@given(st.integers(1, 10**9), st.integers(0, 10**5), st.integers(1, 200_000), st.integers(1, 64))
def test_a_footprint_wants_at_least_its_minimum(weights: int, per_token: int, context: int, rows: int) -> None:
    minimum, wanted = footprint(Estimate(weights, per_token, context), rows=rows, kv_memory=None)
    assert weights <= minimum <= wanted
    assert footprint(Estimate(weights, per_token, context), rows=rows, kv_memory=0) == (minimum, minimum)


@pytest.mark.parametrize("layout", ["classes", "rectangle"])
@pytest.mark.parametrize("device", ["cpu (test)", "cuda (test)"])
@given(context=st.integers(1, 200_000), rows=st.integers(1, 64))
def test_a_footprint_has_room_for_the_context(
    layout: Literal["classes", "rectangle"], device: str, context: int, rows: int
) -> None:
    """With all that it wants, the context is whole; with its minimum, it is enough to be useful."""
    minimum, wanted = footprint(Estimate(10_000_000, 1000, context), rows=rows, kv_memory=None)
    facts = dataclasses.replace(FACTS, context_length=context, device=device, kv_layout=layout)
    assert limit_context(facts, wanted, 2**30).context_length >= min(context, MAX_DEFAULT_CONTEXT)
    least = kv_budget(facts, minimum, 2**30).longest_row(context)
    assert least >= min(context, LEAST_TOKENS)


@pytest.mark.parametrize("facts", [FACTS, CALIBRATED], ids=["not calibrated", "calibrated"])
@pytest.mark.parametrize("asked", [None, 100])
def test_the_scheduler_gets_the_chunk_lengths(facts: GenerationFacts, asked: int | None) -> None:
    scheduler = make_scheduler(SchedulerSettings(prefill_chunk=asked), facts)
    scheduler.submit(Generate(1, tuple(range(5001)), 9))
    assert _chunk(scheduler.plan()) == tune(facts).prefill_tokens
    scheduler = make_scheduler(SchedulerSettings(prefill_chunk=asked), facts)
    scheduler.submit(Generate(1, (1, 2), 9))
    scheduler.advance(scheduler.plan(), StepResult())
    scheduler.submit(Generate(2, tuple(range(5001)), 9))
    plan = scheduler.plan()
    if not plan.prefill:  # steps are so short that receiving the prompt shows in one
        scheduler.advance(plan, StepResult(), 0.001)
        plan = scheduler.plan()
    assert plan.decode == (1,)
    assert tune(facts).shortest_chunk <= _chunk(plan) <= (asked or tune(facts).gentle_chunk)


@pytest.mark.parametrize("facts", [FACTS, CALIBRATED], ids=["not calibrated", "calibrated"])
def test_the_prefix_cache_saves_what_is_worth_it(facts: GenerationFacts) -> None:
    tuning = tune(facts)
    for tokens, saved in ((tuning.min_new_tokens - 1, False), (tuning.min_new_tokens, True)):
        scheduler = make_scheduler(SchedulerSettings(prefix_cache_bytes=2**24), facts)
        scheduler.submit(Generate(1, tuple(range(tokens + 1)), 9))
        plans = [_advanced(scheduler) for _ in range(6)]
        blocks = [order.block for plan in plans for order in plan.save]
        assert blocks == ([tuning.block_tokens] if saved else [])


def test_what_a_load_measured_lets_the_first_request_draft_deep_at_once() -> None:
    """Without it, nothing is planned before plain steps were seen, and then few tokens."""
    measured = dataclasses.replace(MEASURED, verifying=((1, 2, 0.0024), (1, 5, 0.0030), (1, 17, 0.0040)))
    known = dataclasses.replace(FACTS, calibration=measured, drafters=("prediction", "prompt-lookup"))
    unknown = dataclasses.replace(known, calibration=None)
    for facts, deepest in ((known, 16), (unknown, 2)):
        scheduler = make_scheduler(SchedulerSettings(), facts)
        scheduler.submit(Generate(1, (1, 2), 99, prediction=tuple(range(50))))
        plans = [_advanced(scheduler, 0.002) for _ in range(6)]
        depths = [most for plan in plans for _, most in plan.drafts]
        assert max(depths) == deepest
        # The prompt is read, then the row joins: the next step is the first that may have drafts.
        assert bool(plans[2].drafts) is (facts is known)
    assert plans[-1].odds is not None and dict(plans[-1].odds.costs)[2] == pytest.approx(1.05), "a guess"


def _advanced(scheduler: GenerationScheduler, seconds: float = 0.0) -> Plan:
    plan = scheduler.plan()
    scheduler.advance(plan, StepResult(tuple(RowOutput(row, (1,)) for row in plan.decode)), seconds)
    return plan


def _chunk(plan: Plan) -> int:
    return plan.prefill[0].end - plan.prefill[0].start
