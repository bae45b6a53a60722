"""The chunk sizer: chunk lengths that the step time of the rows allows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.engine.generation.chunk_sizer import ChunkSizer


def settle(sizer: ChunkSizer, *, step: float, token: float, rounds: int = 60) -> int:
    """Observe decoding rows, then also a long prompt, at these costs; returns the resulting chunk length."""
    for _ in range(rounds):
        sizer.observe(rows=4, prompt_tokens=0, seconds=step)
    for _ in range(rounds):
        chunk = sizer.chunk
        sizer.observe(rows=4, prompt_tokens=chunk, seconds=step + token * chunk)
    return sizer.chunk


def test_without_measurements_a_chunk_has_its_maximum_length() -> None:
    sizer = ChunkSizer(most=128, least=16)
    assert sizer.chunk == 128
    sizer.observe(rows=0, prompt_tokens=128, seconds=1.0)
    assert sizer.chunk == 128


@pytest.mark.parametrize(
    ("token", "chunk"), [(0.00001, 128), (0.0001, 64), (0.0002, 32), (0.0004, 16), (0.01, 16)], ids=str
)
def test_a_chunk_adds_at_most_its_share_of_a_step(token: float, chunk: int) -> None:
    """The length varies between the longest that fits and half of it: a longer attempt is reverted at once."""
    assert max(16, chunk // 2) <= settle(ChunkSizer(most=128, least=16), step=0.0099, token=token) <= chunk


def test_the_length_follows_the_cost_per_token() -> None:
    sizer = ChunkSizer(most=128, least=16)
    assert settle(sizer, step=0.01, token=0.0005) == 16
    assert settle(sizer, step=0.01, token=0.00001) == 128


def run(sizer: ChunkSizer, cost: Callable[[int], float], *, step: float, parts: int = 1, chunks: int = 80) -> list[int]:
    """A long prompt while rows decode, each chunk computed in `parts` steps; returns the chunk lengths."""
    found = []
    for _ in range(20):
        sizer.observe(rows=4, prompt_tokens=0, seconds=step)
    for _ in range(chunks):
        found.append(sizer.chunk)
        for part in range(parts):
            tokens = found[-1] if not part else 0
            sizer.observe(
                rows=4, prompt_tokens=tokens, seconds=step + cost(found[-1]) / parts, prefilling=part < parts - 1
            )
    return found


def test_a_chunk_that_spans_steps_may_be_longer() -> None:
    at_once = run(ChunkSizer(most=512, least=16), lambda tokens: tokens * 0.0001, step=0.01)
    in_parts = run(ChunkSizer(most=512, least=16), lambda tokens: tokens * 0.0001, step=0.01, parts=4)
    assert (at_once[-1], in_parts[-1]) in ((32, 128), (64, 256))


def test_free_seconds_allow_longer_chunks() -> None:
    assert run(ChunkSizer(most=512, least=64, free_seconds=0.006), lambda tokens: tokens * 5e-6, step=0.003)[-1] == 512
    assert run(ChunkSizer(most=512, least=64), lambda tokens: tokens * 5e-6, step=0.003)[-1] <= 256


def test_no_gentle_chunk_makes_gaps_of_three_steps_not_even_the_first() -> None:
    """As on an H200: a chunk costs 4 ms however short it is, and a decode step 2.3 ms."""
    sizer = ChunkSizer(
        most=512,
        least=64,
        free_seconds=0.0047,
        token_seconds=5e-6,
        gentle_token_seconds=5.8e-3 / 512,
        steps=((1, 0.0023),),
    )
    found = run(sizer, lambda tokens: 0.0018 + 7e-6 * tokens, step=0.0023)
    assert set(found) <= {64, 128, 256} and found[0] == 256


def test_the_own_length_of_a_chunk_counts_as_depth() -> None:
    sizer = ChunkSizer(most=512, least=64, longest=8192, token_seconds=5e-6, steps=((1, 0.0023),), max_gap=0.05)
    assert sizer.chunk_for(1e9) == 8192
    assert sizer.chunk_for(1e9, 1.0, 6e-5) == 4096, "8192 tokens would cost a quarter more: 51 ms"


def test_one_slow_step_has_no_lasting_effect() -> None:
    """For example, a row joins while a chunk is computed."""
    sizer = ChunkSizer(most=512, least=64)
    assert run(sizer, lambda tokens: tokens * 1e-6, step=0.01)[-1] == 512
    sizer.observe(rows=4, prompt_tokens=512, seconds=0.05)
    assert run(sizer, lambda tokens: tokens * 1e-6, step=0.01)[-1] == 512


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from([0, 2, 4, 8, 16, 5]), st.floats(0, 1), st.booleans()), max_size=60
    )
)
def test_a_chunk_has_one_of_few_lengths(steps: list[tuple[int, int, float, bool]]) -> None:
    sizer = ChunkSizer(most=16, least=2, longest=64)
    for number, (rows, tokens, seconds, prefilling) in enumerate(steps):
        if number % 7 == 6:
            sizer.skip_steps()
        sizer.observe(rows=rows, prompt_tokens=tokens, seconds=seconds, prefilling=prefilling)
        assert sizer.chunk in (2, 4, 8, 16)
        assert sizer.chunk_for(0) == sizer.chunk
        assert sizer.chunk_for(1e9) in (2, 4, 8, 16, 32, 64)


def test_equal_bounds_fix_the_length() -> None:
    assert settle(ChunkSizer(most=256, least=256), step=0.001, token=1.0) == 256


@pytest.mark.parametrize(("most", "least", "longest"), [(0, 0, 0), (4, 8, 8), (4, 0, 4), (4, 2, 3)])
def test_bounds_are_checked(most: int, least: int, longest: int) -> None:
    with pytest.raises(ValueError, match="least"):
        ChunkSizer(most=most, least=least, longest=longest)


def test_the_gap_is_checked() -> None:
    with pytest.raises(ValueError, match="positive"):
        ChunkSizer(most=4, least=4, max_gap=0)


def pressed(*, step: float, token: float, parts: int = 1) -> ChunkSizer:
    sizer = ChunkSizer(most=128, least=16, longest=2048, max_gap=0.05)
    run(sizer, lambda tokens: tokens * token, step=step, parts=parts)
    return sizer


def test_under_pressure_a_step_lasts_as_long_as_the_gap() -> None:
    sizer = pressed(step=0.01, token=0.0001)
    assert sizer.chunk == 32
    assert sizer.chunk_for(1e9) == 256, "10 ms and 25.6 ms; 512 tokens would make it 61 ms"
    assert sizer.at_once == pytest.approx(400, abs=8)


def test_a_chunk_is_as_long_as_the_pace_needs() -> None:
    sizer = pressed(step=0.01, token=0.0001)
    assert [sizer.chunk_for(pace) for pace in (0, 2000, 3500, 5000, 7000)] == [32, 32, 64, 128, 256]


def test_a_chunk_that_spans_steps_may_be_longer_under_pressure() -> None:
    """Four of five steps compute it."""
    assert pressed(step=0.01, token=0.0001, parts=5).chunk_for(1e9) == 1024


def test_rows_that_are_slower_than_the_gap_have_steps_of_a_few_of_theirs() -> None:
    sizer = pressed(step=0.06, token=0.001)
    assert sizer.chunk == 16
    assert sizer.chunk_for(1e9) == 64, "60 and 64 ms, 2.1 steps; 128 tokens would make it 3.1"
    assert sizer.at_once == pytest.approx(90, abs=1)


def test_prompts_that_wait_long_may_make_longer_steps_beside_slow_rows_alone() -> None:
    slow, quick = pressed(step=0.06, token=0.001), pressed(step=0.01, token=0.001)
    before = quick.chunk_for(1e9)
    slow.waited = quick.waited = 6.0
    assert slow.chunk_for(1e9) == 256, "a sixteenth is 0.375 s"
    slow.waited = 60.0
    assert slow.chunk_for(1e9) == 256, "ten gaps are 0.5 s"
    assert quick.chunk_for(1e9) == before, "the longest gap holds"


def test_the_fixed_cost_of_a_chunk_is_not_taken_for_that_of_its_tokens() -> None:
    """A CPU reads all weights for a chunk, for 30 ms: else chunks of 16 tokens seem to cost 3 ms per token, and longer
    ones too much."""
    sizer = ChunkSizer(
        most=64, least=16, longest=1024, free_seconds=0.01, fixed_seconds=0.03, token_seconds=0.0015, max_gap=0.05
    )
    for _ in range(3):
        sizer.observe(rows=4, prompt_tokens=0, seconds=0.04)
    for tokens in (16, 16, 16, 0, 0):
        sizer.observe(rows=4, prompt_tokens=tokens, seconds=0.04 + (0.03 + 0.0015 * tokens if tokens else 0))
    sizer.rows, sizer.waited = 4, 3.0
    assert sizer.chunk_for(1e9) == 64, "166 of 169 ms"


def test_costs_are_known_before_a_step_without_prefill_was_seen() -> None:
    """Prompts that arrive together: a row decodes beside chunks from its first step on."""
    sizer = ChunkSizer(most=128, least=16, longest=2048, max_gap=0.05)
    sizer.observe(rows=0, prompt_tokens=10, seconds=1.0)
    assert sizer.at_once is None, "too short a prompt to tell the cost of a token"
    sizer.observe(rows=0, prompt_tokens=1000, seconds=0.1)
    sizer.observe(rows=1, prompt_tokens=128, seconds=0.0228)
    assert sizer.at_once == pytest.approx(400, abs=2)
    assert sizer.chunk_for(1e9) == 256


def h200() -> ChunkSizer:
    sizer = ChunkSizer(most=512, least=64, longest=8192, free_seconds=0.0042, token_seconds=5e-6, steps=((1, 0.0023),))
    for _ in range(20):
        sizer.observe(rows=40, prompt_tokens=0, seconds=0.0023)
    return sizer


def test_short_prompts_say_nothing_about_what_a_long_chunk_costs() -> None:
    """100 tokens cost 4 ms, and 4,000 cost 24: what a step may complete does not follow from the former."""
    sizer = h200()
    for _ in range(50):
        sizer.observe(rows=40, prompt_tokens=100, seconds=0.0023 + 0.004)
    assert sizer.at_once is not None and sizer.at_once > 8000
    assert sizer.chunk_for(1e9) >= 4096


def test_one_slow_step_does_not_shorten_chunks_but_two_do() -> None:
    """The first step of a new shape compiles kernels."""
    sizer = h200()
    for seconds, least in ((0.02, 8000), (0.4, 8000), (0.02, 8000)):
        sizer.observe(rows=40, prompt_tokens=3000, seconds=0.0023 + seconds)
        sizer.observe(rows=40, prompt_tokens=3000, seconds=0.0023 + 0.02)
        assert sizer.at_once is not None and sizer.at_once > least
    for _ in range(3):
        sizer.observe(rows=40, prompt_tokens=3000, seconds=0.0023 + 0.1)
    assert sizer.at_once is not None and sizer.at_once < 2500


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 300), st.sampled_from([0.0, 1e-9, 0.002, 0.4])), max_size=30)
)
def test_whatever_steps_took_short_prompts_get_a_budget_and_parts(steps: list[tuple[int, int, float]]) -> None:
    """A step may take no measurable time."""
    sizer = ChunkSizer(most=64, least=4, longest=256, free_seconds=0.001)
    for rows, tokens, seconds in steps:
        sizer.observe(rows=rows, prompt_tokens=tokens, seconds=seconds)
        sizer.rows = max(1, rows)
        assert 2 <= sizer.parts(tokens, gentle=True) <= 8
        if not sizer.is_slow:
            assert sizer.in_parts(1e9) >= sizer.in_parts(0.0) >= 4
            assert 0 < sizer.gathering <= 2 * sizer.max_gap
