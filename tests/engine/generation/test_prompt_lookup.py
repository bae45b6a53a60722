"""Drafts from a row's own context, against a plain search."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millstream.engine.generation.speculation.prompt_lookup import LONGEST, SHORTEST, PromptLookup


def plain_draft(tokens: list[int], count: int) -> tuple[int, ...]:
    for length in range(min(LONGEST, len(tokens) - 1), SHORTEST - 1, -1):
        latest = tokens[-length:]
        for at in range(len(tokens) - length - 1, -1, -1):
            if tokens[at : at + length] == latest:
                return tuple(tokens[at + length : at + length + count])
    return ()


def test_a_repeated_phrase_is_continued() -> None:
    assert PromptLookup([5, 6, 7, 8, 9, 5, 6]).draft(3) == (7, 8, 9)


def test_the_longest_run_counts_and_then_the_latest() -> None:
    assert PromptLookup([1, 2, 3, 10, 2, 3, 11, 1, 2, 3]).draft(1) == (10,)
    assert PromptLookup([2, 3, 10, 2, 3, 11, 2, 3]).draft(1) == (11,)


def test_new_words_have_no_draft() -> None:
    assert PromptLookup([1, 2, 3, 4]).draft(4) == ()
    assert PromptLookup([]).draft(4) == ()


@given(
    st.lists(st.sampled_from([0, 1, 2, 256, 65536, 0x01000001]), max_size=60),
    st.lists(st.sampled_from([0, 1, 256]), max_size=6),
    st.integers(1, 9),
)
def test_it_is_a_plain_search(tokens: list[int], more: list[int], count: int) -> None:
    lookup = PromptLookup(tokens)
    lookup.append(more)
    assert lookup.draft(count) == plain_draft(tokens + more, count)
    assert len(lookup) == len(tokens) + len(more)
