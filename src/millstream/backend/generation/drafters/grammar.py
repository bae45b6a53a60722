"""Drafts what a row's grammar forces: keys of a JSON schema, the name of a required tool, the marks around them.

The bytes are certain, but not their tokens: the model may write `":` as one token or as two. So forced tokens are
drafts like all others, and the target's own choice decides. Where a forced run ends, the drafter goes on with what the
target chose the last time at such a place: whether it writes a space after `:` and `,` is a habit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from llguidance import LLMatcher

from millstream.engine.generation.messages import Generate

Place = bytes | int
"""Where a token was chosen: before these forced bytes, or where nothing is forced after this token."""

MAX_PLACES = 2_048
"""Places whose habits are remembered, over all rows: a model writes all of its JSON alike."""
MAX_HABITS = 3
"""Tokens remembered per place, latest first: the first that the grammar allows is drafted."""

STEADY = 2
"""How often in a row a token must have been chosen at a place before it begins a draft there."""
MAX_GUESSES = 2
"""Habits after each other without a forced token between: a comma and a quote."""


class Habits:
    """What the target chose at places where the grammar leaves a choice."""

    def __init__(self) -> None:
        self._chosen: OrderedDict[Place, tuple[list[int], int]] = OrderedDict()
        """The tokens, latest first, and how often in a row the first of them was chosen."""

    def __len__(self) -> int:
        return len(self._chosen)

    def learn(self, place: Place, token: int) -> None:
        tokens, times = self._chosen.pop(place, ([], 0))
        times = times + 1 if tokens[:1] == [token] else 1
        self._chosen[place] = ([token, *(each for each in tokens if each != token)][:MAX_HABITS], times)
        if len(self._chosen) > MAX_PLACES:
            self._chosen.popitem(last=False)

    def at(self, place: Place, least: int = 1) -> Sequence[int]:
        """None if the latest was not chosen `least` times in a row."""
        tokens, times = self._chosen.get(place, ((), 0))
        return tokens if times >= least else ()


@dataclass(slots=True)
class _Row:
    """What the drafter knows of a row."""

    last: int
    """Its latest token."""
    draft: tuple[int, ...] = ()
    """Its last draft, until the next token comes."""
    places: dict[int, Place] = field(default_factory=dict)
    """Positions of the last walk, counted from its begin, that were choices: what comes there is a habit."""


class GrammarDrafter:
    """Owner only. Implements `Drafter` for rows with a grammar."""

    name = "grammar"
    cheap = True

    def __init__(self, matcher: Callable[[int], LLMatcher | None], vocab_size: int) -> None:
        """`matcher`: of a row, which has consumed all of the row's tokens; None if it has no grammar (any more).
        `vocab_size`: of the model. The tokenizer may have more tokens, and no embedding is there for these."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._rows: dict[int, _Row] = {}
        self._habits = Habits()

    def __len__(self) -> int:
        """Rows that it knows."""
        return len(self._rows)

    def join(self, submit: Generate) -> None:
        if submit.grammar is not None:
            self._rows[submit.request_id] = _Row(submit.prompt[-1])

    def drop(self, ids: set[int]) -> None:
        for request_id in ids:
            self._rows.pop(request_id, None)

    def commit(self, request_id: int, tokens: Sequence[int]) -> None:
        row = self._rows.get(request_id)
        if row is None or not tokens:
            return
        for position, token in enumerate(tokens):
            if (place := row.places.get(position)) is not None:
                self._habits.learn(place, token)
            if row.draft[position : position + 1] != (token,):
                break  # from here on it was another walk
        row.draft, row.places, row.last = (), {}, tokens[-1]

    def propose(self, wanted: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
        drafts: dict[int, tuple[int, ...]] = {}
        for request_id, most in wanted.items():
            row = self._rows.get(request_id)
            matcher = None if row is None else self._matcher(request_id)
            if row is not None and matcher is not None and most > 0:
                row.draft, row.places = self._walk(matcher.deep_copy(), row.last, most)
                if row.draft:
                    drafts[request_id] = row.draft
        return drafts

    def _walk(self, matcher: LLMatcher, last: int, most: int) -> tuple[tuple[int, ...], dict[int, Place]]:
        """A draft, and the positions of its choices. `matcher`: a copy, which may even fail: the row goes on."""
        draft: list[int] = []
        places: dict[int, Place] = {}
        worth = 0
        """How much of the draft to keep: up to its last forced token, and up to two habits that follow at once."""
        habits = 0
        while len(draft) < most and not matcher.is_stopped():
            if forced := self._known(matcher.compute_ff_tokens()[: most - len(draft)]):
                consumed = matcher.try_consume_tokens(forced)
                draft += forced[:consumed]
                if consumed < len(forced):
                    break
                worth, habits = len(draft), 0
                continue
            coming = matcher.compute_ff_bytes()
            place = places[len(draft)] = coming or (draft[-1] if draft else last)
            # In the middle of a text nearly every token has a habit: only steady ones are tried.
            known = self._habits.at(place, least=1 if coming or worth else STEADY)
            token = next((each for each in known if matcher.validate_tokens([each])), None)
            if token is None or habits == MAX_GUESSES or not matcher.try_consume_tokens([token]):
                break
            draft.append(token)
            habits += 1
            if coming or (worth and worth == len(draft) - 1):
                worth = len(draft)
        return tuple(draft[:worth]), places

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """The tokens before the first one that the model does not have."""
        beyond = (number for number, token in enumerate(tokens) if token >= self._vocab_size)
        return list(tokens[: next(beyond, len(tokens))])
