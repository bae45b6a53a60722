"""The pace: chunks as long as the rows' own step allows."""

from __future__ import annotations

import pytest

from millstream.engine.pace import Pace


def settle(pace: Pace, *, step: float, token: float, rounds: int = 60) -> int:
    """Rows alone, then a long prompt beside them on a machine with these costs; the chunk that it comes to."""
    for _ in range(rounds):
        pace.observe(rows=4, prompt_tokens=0, seconds=step)
    for _ in range(rounds):
        chunk = pace.chunk
        pace.observe(rows=4, prompt_tokens=chunk, seconds=step + token * chunk)
    return pace.chunk


def test_without_a_measure_a_chunk_is_as_long_as_it_may_be() -> None:
    pace = Pace(most=128, least=16)
    assert pace.chunk == 128
    pace.observe(rows=0, prompt_tokens=128, seconds=1.0)
    assert pace.chunk == 128


@pytest.mark.parametrize(
    ("token", "chunk"), [(0.00001, 128), (0.0001, 64), (0.0002, 32), (0.0004, 16), (0.01, 16)], ids=str
)
def test_a_chunk_takes_no_longer_than_the_rows_step(token: float, chunk: int) -> None:
    """The length hovers between the longest that fits and half of it: a longer try is taken back at once."""
    assert max(16, chunk // 2) <= settle(Pace(most=128, least=16), step=0.0099, token=token) <= chunk


def test_it_follows_a_context_that_grows_dearer_and_recovers() -> None:
    pace = Pace(most=128, least=16)
    assert settle(pace, step=0.01, token=0.0005) == 16
    assert settle(pace, step=0.01, token=0.00001) == 128


def test_a_fixed_pace_stays() -> None:
    assert settle(Pace(most=256, least=256), step=0.001, token=1.0) == 256


@pytest.mark.parametrize(("most", "least"), [(0, 0), (4, 8), (4, 0)])
def test_bounds_are_checked(most: int, least: int) -> None:
    with pytest.raises(ValueError, match="least"):
        Pace(most=most, least=least)


def test_what_is_short_is_never_cut() -> None:
    pace = Pace(most=128, least=16)
    settle(pace, step=0.01, token=0.01)
    assert pace.chunk == 16
    assert [pace.limit(left) for left in (1, 45, 128, 129, 5000)] == [1, 45, 128, 16, 16]
