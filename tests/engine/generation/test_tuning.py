"""How memory is shared out, and what that leaves for rows and context."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from millstream.engine.generation.tuning import limit_context, prefix_cache_share
from millstream.loading.memory import footprint
from millstream.model_facts import LEAST_TOKENS, GenerationFacts, PrefixSizes
from millstream.models.estimate import Estimate

FACTS = GenerationFacts(
    8192, 1000, 8, 10_000_000, "float32", "cpu (test)", prefix_sizes=PrefixSizes(1000), kv_bytes_per_token=1000
)


def test_without_a_budget_nothing_is_cut() -> None:
    assert limit_context(FACTS, None, 2**30) is FACTS
    assert prefix_cache_share(FACTS, None, 2**30) == 2**30
    assert prefix_cache_share(dataclasses.replace(FACTS, prefix_sizes=None), None, 2**30) == 0


@given(st.integers(10_000_000, 60_000_000), st.integers(0, 50_000_000))
def test_weights_kept_beginnings_and_one_row_fit_what_was_granted(granted: int, asked: int) -> None:
    kept = prefix_cache_share(FACTS, granted, asked)
    facts = limit_context(FACTS, granted, asked)
    assert 0 <= kept <= asked
    assert facts.context_length <= FACTS.context_length
    row = facts.context_length * facts.kv_bytes_per_token
    if facts.context_length > LEAST_TOKENS:
        assert facts.weight_bytes + kept + row <= granted
    if facts.context_length < FACTS.context_length:
        assert "--memory" in facts.notes[-1]


@given(st.integers(1, 10**9), st.integers(0, 10**5), st.integers(1, 200_000), st.integers(1, 64))
def test_a_footprint_asks_for_at_least_its_least(weights: int, per_token: int, context: int, rows: int) -> None:
    least, want = footprint(Estimate(weights, per_token, context), rows=rows, kv_memory=None)
    assert weights <= least <= want
    assert footprint(Estimate(weights, per_token, context), rows=rows, kv_memory=0) == (least, least)
