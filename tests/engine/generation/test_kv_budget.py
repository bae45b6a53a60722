"""The KV budget: what rows take in each layout, what is admitted, and how long a row may become."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.engine.generation.kv_budget import (
    AHEAD,
    MERGED_TOKENS,
    PADDING_TOKENS,
    KvBudget,
    LayoutName,
    Phase,
    Row,
    Windows,
    tokens_for_row,
)
from millstream.engine.generation.kv_capacity import kv_capacity

LAYOUTS: list[tuple[LayoutName, Windows]] = [
    ("classes", ()),
    ("classes", ((512, 0.8),)),
    ("classes", ((64, 0.3), (4096, 0.5))),
    ("rectangle", ()),
]
lengths = st.integers(1, 300_000)
rows = st.lists(st.builds(Row, lengths, st.sampled_from(Phase)), max_size=12)


def budget(usable: int) -> KvBudget:
    """With so many tokens beside what merging slabs takes."""
    return KvBudget(min(usable + MERGED_TOKENS, 8 * usable // 7))


def test_without_a_bound_everything_fits() -> None:
    free = KvBudget(None)
    many = [Row(10**9, Phase.JOINING)] * 100
    assert free.fits(many) and free.admits(many, 10**9) and free.longest_row(10**9) == 10**9


@pytest.mark.parametrize(
    ("row", "needed"),
    [
        (Row(10_000, Phase.PREFILLING), 10_240 + PADDING_TOKENS),
        (Row(10_000, Phase.JOINING), 10_240 + PADDING_TOKENS + 10_240),
        (Row(10_000, Phase.DECODING), 10_240),
        (Row(10_240 - AHEAD, Phase.DECODING), 10_240),
        (Row(10_240 - AHEAD + 1, Phase.DECODING), 10_240 + 12_288),
        (Row(10_240, Phase.JOINING), 10_240 + PADDING_TOKENS + 12_288),
    ],
)
def test_a_row_counts_by_its_class_and_twice_while_it_is_copied(row: Row, needed: int) -> None:
    others = [Row(60_000, Phase.DECODING)]
    assert budget(needed + kv_capacity(60_000)).fits([row, *others])
    assert not budget(needed + kv_capacity(60_000) - 1).fits([row, *others])


@given(rows=rows, prompt=lengths, layout=st.sampled_from(LAYOUTS), tokens=st.integers(1, 20_000_000))
def test_where_there_is_plenty_everything_fits(
    rows: list[Row], prompt: int, layout: tuple[LayoutName, Windows], tokens: int
) -> None:
    subject = KvBudget(tokens, *layout)
    longest = max((row.tokens for row in rows), default=0)
    if subject.has_plenty(len(rows), longest + 64):
        assert subject.fits(rows) and subject.sure_tokens(rows) == 64
    if subject.has_plenty(len(rows) + 1, max(longest, prompt) + 64 + prompt // 64):
        assert subject.admits(rows, prompt)


def test_plenty_is_not_asked_too_much() -> None:
    assert KvBudget(200_000).has_plenty(64, 300)
    assert not KvBudget(50_000).has_plenty(64, 300)


def test_in_a_rectangle_the_longest_row_counts_for_all() -> None:
    three = [Row(1000, Phase.DECODING), Row(10, Phase.DECODING), Row(10, Phase.PREFILLING)]
    assert KvBudget(3 * 1280, "rectangle").fits(three)
    assert not KvBudget(3 * 1280 - 1, "rectangle").fits(three)


@given(rows, st.integers(0, 2_000_000), st.sampled_from(LAYOUTS))
def test_steps_that_are_not_checked_fit(held: list[Row], tokens: int, layout: tuple[LayoutName, Windows]) -> None:
    subject = KvBudget(tokens, *layout)
    for steps in range(sure + 1 if (sure := subject.sure_tokens(held)) else 0):
        grown = [
            Row(row.tokens + steps, Phase.DECODING) if row.phase is not Phase.PREFILLING and steps else row
            for row in held
        ]
        assert subject.fits(grown)


@given(rows, lengths, st.integers(0, 2_000_000), st.sampled_from(LAYOUTS))
def test_an_admitted_request_fits_now_and_alone_it_always_starts(
    held: list[Row], prompt: int, tokens: int, layout: tuple[LayoutName, Windows]
) -> None:
    subject = KvBudget(tokens, *layout)
    if held and subject.admits(held, prompt):
        assert subject.fits([*held, Row(prompt, Phase.PREFILLING)])
    assert subject.admits([], prompt)


@given(lengths, st.sampled_from(LAYOUTS))
def test_a_row_may_be_as_long_as_its_budget_says(length: int, layout: tuple[LayoutName, Windows]) -> None:
    assert KvBudget(tokens_for_row(length, *layout), *layout).longest_row(2 * length) >= length


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_longer_row_never_needs_a_smaller_budget(layout: tuple[LayoutName, Windows]) -> None:
    """It may start again at any length. With windows, joining takes more at 1,024 tokens than at 1,025."""
    needed = [tokens_for_row(length, *layout) for length in range(1, 6000)]
    assert needed == sorted(needed)


@given(st.integers(0, 500_000), st.integers(1, 300_000), st.sampled_from(LAYOUTS))
def test_the_longest_row_fits_in_every_phase(tokens: int, most: int, layout: tuple[LayoutName, Windows]) -> None:
    subject = KvBudget(tokens, *layout)
    longest = subject.longest_row(most)
    assert 0 <= longest <= most
    near = [length for length in (1, longest // 2, longest - 1, longest) if 0 < length <= longest]
    assert all(subject.fits([Row(length, phase)]) for phase in Phase for length in near)
    if longest < most:
        beyond = range(max(1, longest - 1), longest + 2)
        assert not all(subject.fits([Row(length, phase)]) for phase in Phase for length in beyond)


def test_a_window_takes_no_more_than_its_ring() -> None:
    """Of a long row only the layers with full attention grow."""
    windows: Windows = ((512, 0.8),)
    assert tokens_for_row(100_000, "classes", windows) < 0.5 * tokens_for_row(100_000)
    rows = [Row(20_000, Phase.DECODING)] * 8
    assert KvBudget(70_000, "classes", windows).fits(rows)
    assert not KvBudget(70_000).fits(rows)
