"""The pace: chunks as long as the rows' own step allows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.engine.generation.chunk_sizer import ChunkSizer


def settle(pace: ChunkSizer, *, step: float, token: float, rounds: int = 60) -> int:
    """Rows alone, then a long prompt beside them on a machine with these costs; the chunk that it comes to."""
    for _ in range(rounds):
        pace.observe(rows=4, prompt_tokens=0, seconds=step)
    for _ in range(rounds):
        chunk = pace.chunk
        pace.observe(rows=4, prompt_tokens=chunk, seconds=step + token * chunk)
    return pace.chunk


def test_without_a_measure_a_chunk_is_as_long_as_it_may_be() -> None:
    pace = ChunkSizer(most=128, least=16)
    assert pace.chunk == 128
    pace.observe(rows=0, prompt_tokens=128, seconds=1.0)
    assert pace.chunk == 128


@pytest.mark.parametrize(
    ("token", "chunk"), [(0.00001, 128), (0.0001, 64), (0.0002, 32), (0.0004, 16), (0.01, 16)], ids=str
)
def test_a_chunk_takes_no_longer_than_the_rows_step(token: float, chunk: int) -> None:
    """The length hovers between the longest that fits and half of it: a longer try is taken back at once."""
    assert max(16, chunk // 2) <= settle(ChunkSizer(most=128, least=16), step=0.0099, token=token) <= chunk


def test_it_follows_a_context_that_grows_dearer_and_recovers() -> None:
    pace = ChunkSizer(most=128, least=16)
    assert settle(pace, step=0.01, token=0.0005) == 16
    assert settle(pace, step=0.01, token=0.00001) == 128


def run(pace: ChunkSizer, cost: Callable[[int], float], *, step: float, parts: int = 1, chunks: int = 80) -> list[int]:
    """A long prompt beside rows, each chunk computed in so many steps; the chunks that there were."""
    found = []
    for _ in range(20):
        pace.observe(rows=4, prompt_tokens=0, seconds=step)
    for _ in range(chunks):
        found.append(pace.chunk)
        for part in range(parts):
            tokens = found[-1] if not part else 0
            pace.observe(
                rows=4, prompt_tokens=tokens, seconds=step + cost(found[-1]) / parts, prefilling=part < parts - 1
            )
    return found


def test_a_chunk_that_is_computed_in_parts_may_be_longer() -> None:
    at_once = run(ChunkSizer(most=512, least=16), lambda tokens: tokens * 0.0001, step=0.01)
    in_parts = run(ChunkSizer(most=512, least=16), lambda tokens: tokens * 0.0001, step=0.01, parts=4)
    assert (at_once[-1], in_parts[-1]) in ((32, 128), (64, 256))


def test_what_a_chunk_may_add_in_any_case() -> None:
    assert run(ChunkSizer(most=512, least=64, free_seconds=0.006), lambda tokens: tokens * 5e-6, step=0.002)[-1] == 512
    assert run(ChunkSizer(most=512, least=64), lambda tokens: tokens * 5e-6, step=0.002)[-1] <= 256


def test_one_step_that_takes_long_is_forgiven() -> None:
    """As when a row joins while a chunk is computed."""
    pace = ChunkSizer(most=512, least=64)
    assert run(pace, lambda tokens: tokens * 1e-6, step=0.01)[-1] == 512
    pace.observe(rows=4, prompt_tokens=512, seconds=0.05)
    assert run(pace, lambda tokens: tokens * 1e-6, step=0.01)[-1] == 512


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from([0, 2, 4, 8, 16, 5]), st.floats(0, 1), st.booleans()), max_size=60
    )
)
def test_whatever_it_is_told_a_chunk_is_one_of_few_lengths(steps: list[tuple[int, int, float, bool]]) -> None:
    pace = ChunkSizer(most=16, least=2)
    for number, (rows, tokens, seconds, reading) in enumerate(steps):
        if number % 7 == 6:
            pace.skip_steps()
        pace.observe(rows=rows, prompt_tokens=tokens, seconds=seconds, prefilling=reading)
        assert pace.chunk in (2, 4, 8, 16)
        assert pace.limit(10_000) == pace.chunk


def test_a_fixed_pace_stays() -> None:
    assert settle(ChunkSizer(most=256, least=256), step=0.001, token=1.0) == 256


@pytest.mark.parametrize(("most", "least"), [(0, 0), (4, 8), (4, 0)])
def test_bounds_are_checked(most: int, least: int) -> None:
    with pytest.raises(ValueError, match="least"):
        ChunkSizer(most=most, least=least)


def test_what_is_short_is_never_cut() -> None:
    pace = ChunkSizer(most=128, least=16)
    settle(pace, step=0.01, token=0.01)
    assert pace.chunk == 16
    assert [pace.limit(left) for left in (1, 45, 128, 129, 5000)] == [1, 45, 128, 16, 16]
