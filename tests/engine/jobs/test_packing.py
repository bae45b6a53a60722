"""Packing: inputs of like length in one batch, within a token budget and a bound on padding."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millstream.engine.jobs.packing import PAD_SHARE, Job, Limits, pack
from support.encodes import encode

lengths = st.lists(st.integers(1, 300), min_size=1, max_size=40)


def job(request_id: int, *sizes: int) -> Job:
    return Job(encode(request_id, sizes))


def test_the_longest_input_of_the_anchor_sets_the_length() -> None:
    batch = pack(job(1, 10, 100, 98), [], Limits(tokens=1000))
    assert [(length, index) for _, length, index in batch] == [(100, 1), (98, 2)]


def test_others_fill_what_is_left_with_inputs_of_like_length() -> None:
    first, second, third = job(1, 100), job(2, 5, 99, 200), job(3, 97, 96)
    batch = pack(first, [second, third], Limits(tokens=400))
    assert [(each.submit.request_id, length) for each, length, _ in batch] == [(1, 100), (2, 99), (3, 97), (3, 96)]
    assert [length for length, _ in second.pending] == [5, 200]


def test_one_input_may_be_longer_than_a_batch() -> None:
    batch = pack(job(1, 500, 500), [job(2, 500)], Limits(tokens=100))
    assert [(length, index) for _, length, index in batch] == [(500, 1)]


def test_padding_is_taken_where_a_step_costs_more() -> None:
    assert len(pack(job(1, 100, 10), [], Limits(tokens=1000))) == 1
    assert len(pack(job(1, 100, 10), [], Limits(tokens=1000, free_tokens=90))) == 2


@given(lengths, st.lists(lengths, max_size=4), st.integers(1, 2000), st.integers(0, 200))
def test_a_batch_keeps_its_limits(
    anchor: list[int], others: list[list[int]], most_tokens: int, free_tokens: int
) -> None:
    jobs = [job(number, *each) for number, each in enumerate([anchor, *others])]
    before = sum(each.tokens for each in jobs)
    batch = pack(jobs[0], jobs[1:], Limits(most_tokens, free_tokens))
    longest = max(length for _, length, _ in batch)
    real = sum(length for _, length, _ in batch)
    padded = longest * len(batch)
    assert longest == batch[0][1] == max(anchor)
    assert len(batch) == 1 or padded <= most_tokens
    assert padded - real <= max(PAD_SHARE * padded, free_tokens)
    left = [(each.submit.request_id, index) for each in jobs for _, index in each.pending]
    taken = [(each.submit.request_id, index) for each, _, index in batch]
    assert sorted(left + taken) == sorted(
        (number, i) for number, each in enumerate([anchor, *others]) for i in range(len(each))
    )
    assert sum(each.tokens for each in jobs) == before - real
    assert all(each.pending == sorted(each.pending) for each in jobs)
    assert all(each.tokens == sum(length for length, _ in each.pending) for each in jobs)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(40, 400))
def test_a_batch_has_room_for_no_other_input_of_its_length(sizes: list[int], most_tokens: int) -> None:
    """All inputs of the longest length are taken, as far as the budget goes."""
    batch = pack(job(1, *sizes), [], Limits(most_tokens))
    longest = max(sizes)
    fitting = min(sizes.count(longest), most_tokens // longest)
    assert sum(length == longest for _, length, _ in batch) >= fitting
