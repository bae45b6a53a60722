"""Drafts from a text that an answer may repeat, against a plain search."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.engine.generation.speculation import prompt_lookup
from millstream.engine.generation.speculation.prompt_lookup import (
    LONGEST,
    SHORTEST,
    PredictionLookup,
    PromptLookup,
)


def longest_match(tokens: list[int]) -> int:
    """The most of the latest tokens that stood together before, by a plain search."""
    for length in range(min(LONGEST, len(tokens) - 1), SHORTEST - 1, -1):
        latest = tokens[-length:]
        if any(tokens[at : at + length] == latest for at in range(len(tokens) - length)):
            return length
    return 0


def test_a_repeated_phrase_is_continued() -> None:
    assert PromptLookup([5, 6, 7, 8, 9, 5, 6]).draft(3) == (7, 8, 9)


def test_the_longest_match_counts_and_then_the_latest() -> None:
    assert PromptLookup([1, 2, 3, 10, 2, 3, 11, 1, 2, 3]).draft(1) == (10,)
    assert PromptLookup([2, 3, 10, 2, 3, 11, 2, 3]).draft(1) == (11,)


def test_new_words_have_no_draft() -> None:
    assert PromptLookup([1, 2, 3, 4]).draft(4) == ()
    assert PromptLookup([]).draft(4) == ()
    assert PromptLookup([1, 2, 1, 2]).draft(0) == ()


def test_what_repeats_itself_goes_on_to_do_so() -> None:
    assert PromptLookup([7, 1, 2, 1, 2]).draft(5) == (1, 2, 1, 2, 1)


@given(
    st.lists(st.integers(0, 3), max_size=28),
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=5),
    st.integers(1, 9),
)
def test_a_draft_follows_a_longest_match(tokens: list[int], steps: list[list[int]], count: int) -> None:
    """Whatever was looked up before. Texts are short enough that every place is a candidate."""
    lookup = PromptLookup(tokens)
    for more in steps:
        lookup.draft(count)
        lookup.append(more)
        tokens = tokens + more
    draft = lookup.draft(count)
    length = longest_match(tokens)
    if length:
        latest = tokens[-length:]
        places = [at + length for at in range(len(tokens) - length) if tokens[at : at + length] == latest]
        repeated = [[(tokens[at:] * count)[each] for each in range(count)] for at in places]
        assert list(draft) in repeated or lookup.agreed > length
    assert len(lookup) == len(tokens)


def test_a_long_prompt_is_indexed_over_several_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_lookup, "INDEXED_AT_ONCE", 100)
    text = list(range(1, 251))
    lookup = PromptLookup([*text, 201, 202])
    assert [lookup.draft(2) for _ in range(3)] == [(), (), (203, 204)]


def accepted(lookup: PromptLookup | PredictionLookup, answer: list[int], depth: int) -> tuple[int, int]:
    """Passes that an answer takes, and tokens that drafts gave."""
    at = passes = right = 0
    while at < len(answer):
        draft = lookup.draft(depth)
        gained = 0
        while gained < len(draft) and at + gained < len(answer) and draft[gained] == answer[at + gained]:
            gained += 1
        lookup.append(answer[at : at + gained + 1])
        at, passes, right = at + gained + 1, passes + 1, right + gained
    return passes, right


def edited(text: list[int], rng: random.Random) -> list[int]:
    """A text in which one word in 25 is replaced, left out or added."""
    answer: list[int] = []
    for token in text:
        change = rng.random()
        if change < 0.02:
            answer.append(5000 + rng.randrange(1000))
        elif change < 0.03:
            answer += [token, 6000 + rng.randrange(1000)]
        elif change >= 0.04:
            answer.append(token)
    return answer


@pytest.mark.parametrize("seed", range(3))
def test_an_edit_is_followed_from_change_to_change(seed: int) -> None:
    rng = random.Random(seed)
    text = [rng.choice((rng.randrange(30), rng.randrange(400))) for _ in range(600)]
    answer = edited(text, rng)
    passes, _ = accepted(PredictionLookup(text), answer, 8)
    assert passes < len(answer) / 3.3
    passes, _ = accepted(PromptLookup([*text, 9001, 9002, 9003]), answer, 8)
    assert passes < len(answer) / 3.3


def test_a_prediction_is_followed_from_its_first_token_and_after_a_replaced_word() -> None:
    lookup = PredictionLookup([1, 2, 3, 4, 5, 6, 7])
    assert lookup.draft(3) == (1, 2, 3)
    lookup.append([1, 9])
    assert lookup.draft(3) == ()
    lookup.append([3])  # 2 was replaced by 9
    assert lookup.draft(3) == (4, 5, 6)
    lookup.append([4, 5, 6, 7])
    assert lookup.draft(3) == ()


def test_a_resumed_answer_is_found_in_its_prediction() -> None:
    assert PredictionLookup([1, 2, 3, 4, 5], [1, 2, 3]).draft(4) == (4, 5)
