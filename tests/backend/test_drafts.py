"""Drafters are asked in order, and follow the rows that may speculate."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from millstream.backend.generation.drafters.drafts import Drafts
from millstream.backend.generation.drafters.prediction import PredictionDrafter
from millstream.backend.generation.drafters.prompt_lookup import PromptLookupDrafter
from millstream.backend.generation.speculating import Speculating
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.speculation.sources import drafter_of, sources_of


class Fixed:
    """Proposes what it was made with, and remembers what it was told."""

    def __init__(self, name: str, drafts: Mapping[int, tuple[int, ...]], *, cheap: bool = True) -> None:
        self.name, self.cheap = name, cheap
        self._drafts = drafts
        self.rows: dict[int, list[int]] = {}
        self.asked: list[set[int]] = []

    def join(self, submit: Generate) -> None:
        self.rows[submit.request_id] = list(submit.output)

    def drop(self, ids: set[int]) -> None:
        for each in ids:
            self.rows.pop(each, None)

    def commit(self, request_id: int, tokens: Sequence[int]) -> None:
        self.rows[request_id] += tokens

    def propose(self, wanted: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
        self.asked.append(set(wanted))
        return {row: draft for row, draft in self._drafts.items() if row in wanted}


def test_each_row_gets_its_draft_from_the_first_that_has_one() -> None:
    first = Fixed("first", {1: (5, 6, 7), 3: ()})
    second = Fixed("second", {1: (8,), 2: (9, 9), 3: (4,)}, cheap=False)
    drafts = Drafts([first, second])
    assert drafts.names == ("first", "second") and drafts.always and bool(drafts) and not Drafts()
    for number in (1, 2, 3, 4):
        drafts.join(Generate(number, (1, 2), 9))
    wanted = {1: 2, 2: 5, 3: 1, 4: 3}
    assert drafts.propose(wanted) == {1: (5, 6), 2: (9, 9), 3: (4,)}
    assert drafts.sources == {1: "first", 2: "second", 3: "second"}
    assert second.asked == [{2, 3, 4}]
    assert drafts.propose(wanted, cheap=True) == {1: (5, 6)}
    assert drafts.propose({1: 0, 2: 0}) == {}


def test_rows_that_must_not_speculate_are_not_followed() -> None:
    drafter = Fixed("one", {1: (5,), 2: (5,)})
    drafts = Drafts([drafter])
    drafts.join(Generate(1, (1, 2), 9))
    drafts.join(Generate(2, (1, 2), 9, speculate=False))
    drafts.commit(1, [3])
    drafts.commit(2, [3])
    assert drafter.rows == {1: [3]}
    assert drafts.propose({1: 1, 2: 1}) == {1: (5,)}
    drafts.drop({2, 7})
    assert drafter.rows == {1: [3]}
    drafts.clear()
    assert not drafter.rows and drafts.propose({1: 1}) == {}


def test_prompt_lookup_follows_prompts_and_answers() -> None:
    drafter, sure = PromptLookupDrafter(), PromptLookupDrafter(4)
    for each in (drafter, sure):
        each.join(Generate(1, (1, 2, 3, 4, 5, 6, 9), 9))
        each.join(Generate(2, (7, 8), 9))
        each.commit(1, [2, 3])
        each.commit(3, [2, 3])
    assert drafter.propose({1: 2, 2: 2, 3: 2}) == {1: (4, 5)}
    assert sure.propose({1: 2}) == {}
    for each in (drafter, sure):
        each.commit(1, [4, 5])
        assert each.propose({1: 2}) == {1: (6, 9)}
        each.drop({1, 5})
        assert each.propose({1: 2}) == {}


def test_a_draft_after_a_short_match_is_weak() -> None:
    """Two tokens agree by chance; what is right after them says nothing about drafts after long matches."""
    drafts = Drafts([PredictionDrafter(), PromptLookupDrafter()])
    drafts.join(Generate(1, (1, 2, 3, 4, 5, 6, 7, 8, 9, 2), 9))
    drafts.join(Generate(2, (90, 91), 9, prediction=(1, 2, 3)))
    drafts.commit(1, [3])
    assert drafts.propose({1: 2, 2: 2}) == {1: (4, 5), 2: (1, 2)}
    assert drafts.sources == {1: "prompt-lookup/weak", 2: "prediction"}
    drafts.commit(1, [4])
    assert drafts.propose({1: 2}) == {1: (5, 6)} and drafts.sources == {1: "prompt-lookup"}
    assert {drafter_of(source) for source in sources_of("prompt-lookup")} == {"prompt-lookup"}
    assert sources_of("mtp") == ("mtp",)


class Silent(Fixed):
    """Takes its time, and has nothing."""

    def propose(self, wanted: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
        time.sleep(0.002)
        return super().propose(wanted)


def test_asking_in_vain_is_counted() -> None:
    """Else rows that once had drafts would be asked for some in every step."""
    for found, counted in (({}, True), ({1: (5,)}, False)):
        subject = Speculating(Drafts([Silent("known", found)]))
        subject.join([Generate(1, (1, 2), 9)])
        assert subject.expects_drafts({1: 3}, None, 1) is not counted
        assert (subject.take_seconds() >= 0.002) is counted and subject.take_seconds() == 0


def test_a_prediction_is_followed_from_where_a_preempted_row_was() -> None:
    drafter = PredictionDrafter()
    drafter.join(Generate(1, (90, 91, 1, 2), 9, prediction=(1, 2, 3, 4), resumed=2))
    drafter.join(Generate(2, (90, 91), 9))
    assert drafter.propose({1: 8, 2: 8}) == {1: (3, 4)}
    drafter.commit(1, [3])
    assert drafter.propose({1: 8}) == {1: (4,)}
    drafter.drop({1})
    assert drafter.propose({1: 8}) == {}
