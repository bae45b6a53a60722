"""Which pass pays, once the drafts of a step are there. Pure; the backend asks between drafting and verifying."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

PAYS = 1.03
"""How many times as many tokens per second a longer pass must give to be worth it."""


class Outcome(NamedTuple):
    """What became of a row's draft: its first tokens, up to the first wrong one, were right."""

    request_id: int
    source: str
    """Whose draft it was: see `sources.py`."""
    proposed: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Odds:
    """What the scheduler knows of passes and drafts."""

    costs: tuple[tuple[int, float], ...]
    """(length, its cost relative to a plain step) of the passes that may be chosen."""
    rates: tuple[tuple[int, str, float], ...]
    """(request id, source, the chance that a token of such a draft is right if all before it were)."""


def tokens_of_draft(rate: float, count: int) -> float:
    """How many tokens of a draft of `count` tokens are right on average."""
    rate = min(rate, 0.999)
    return rate * (1 - rate**count) / (1 - rate)


def best_length(odds: Odds, rows: int, drafts: Mapping[int, tuple[str, int]]) -> int:
    """Tokens per row of the pass that gives the most; 1: a plain step. `rows` of the pass; `drafts`: for those that
    have one, its source and how many tokens it has."""
    rate_of = {(row, source): rate for row, source, rate in odds.rates}
    return _best(odds.costs, rows, [(rate_of.get((row, by), 0.0), count) for row, (by, count) in drafts.items()])[0]


def best_if_drafted(costs: Sequence[tuple[int, float]], rows: int, rates: Iterable[float]) -> tuple[int, float]:
    """The same if every row with a rate has a draft that is as long as it may be; and how many times as many tokens per
    second it gives."""
    longest = costs[-1][0] if costs else 1
    return _best(costs, rows, [(rate, longest) for rate in rates])


def _best(costs: Iterable[tuple[int, float]], rows: int, drafts: Sequence[tuple[float, int]]) -> tuple[int, float]:
    best, best_gain = 1, PAYS
    for length, cost in costs:
        if (rows + len(drafts) * (length - 1)) < rows * cost * best_gain:
            continue  # not even if all of them were right
        gained = sum(tokens_of_draft(rate, min(count, length - 1)) for rate, count in drafts)
        if (gain := (rows + gained) / (rows * cost)) >= best_gain:
            best, best_gain = length, gain
    return best, best_gain
