"""How memory is divided between weights, prefix cache, rows and context; and what the scheduler gets of the tuning."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.engine.generation.cost_model import tune
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import Plan, RowOutput, StepResult
from millstream.engine.generation.scheduler import GenerationScheduler
from millstream.engine.generation.tuning import SchedulerSettings, limit_context, make_scheduler, prefix_cache_share
from millstream.loading.memory import footprint
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


@given(st.integers(10_000_000, 60_000_000), st.integers(0, 50_000_000))
def test_weights_prefix_cache_and_one_row_fit_the_granted_memory(granted: int, asked: int) -> None:
    share = prefix_cache_share(FACTS, granted, asked)
    facts = limit_context(FACTS, granted, asked)
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
    assert plan.decode == (1,)
    assert _chunk(plan) == (asked or tune(facts).gentle_chunk)


@pytest.mark.parametrize("facts", [FACTS, CALIBRATED], ids=["not calibrated", "calibrated"])
def test_the_prefix_cache_saves_what_is_worth_it(facts: GenerationFacts) -> None:
    tuning = tune(facts)
    for tokens, saved in ((tuning.min_new_tokens - 1, False), (tuning.min_new_tokens, True)):
        scheduler = make_scheduler(SchedulerSettings(prefix_cache_bytes=2**24), facts)
        scheduler.submit(Generate(1, tuple(range(tokens + 1)), 9))
        plans = [_advanced(scheduler) for _ in range(6)]
        blocks = [order.block for plan in plans for order in plan.save]
        assert blocks == ([tuning.block_tokens] if saved else [])


def _advanced(scheduler: GenerationScheduler) -> Plan:
    plan = scheduler.plan()
    scheduler.advance(plan, StepResult(tuple(RowOutput(row, (1,)) for row in plan.decode)))
    return plan


def _chunk(plan: Plan) -> int:
    return plan.prefill[0].end - plan.prefill[0].start
