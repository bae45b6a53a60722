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
    drafter: str
    proposed: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Odds:
    """What the scheduler knows of passes and drafts."""

    costs: tuple[tuple[int, float], ...]
    """(length, its cost relative to a plain step) of the passes that may be chosen."""
    rates: tuple[tuple[int, str, float], ...]
    """(request id, drafter, the chance that a token of such a draft is right if all before it were)."""


def tokens_of_draft(rate: float, count: int) -> float:
    """How many tokens of a draft of `count` tokens are right on average."""
    rate = min(rate, 0.999)
    return rate * (1 - rate**count) / (1 - rate)


def best_length(odds: Odds, rows: int, drafts: Mapping[int, tuple[str, int]]) -> int:
    """Tokens per row of the pass that gives the most; 1: a plain step. `rows` of the pass; `drafts`: for those that
    have one, whose it is and how many tokens it has."""
    rate_of = {(row, drafter): rate for row, drafter, rate in odds.rates}
    known = [(rate_of.get((row, drafter), 0.0), count) for row, (drafter, count) in drafts.items()]
    return _best(odds.costs, rows, known)[1]


def best_gain(costs: Iterable[tuple[int, float]], rows: int, rates: Iterable[float]) -> float:
    """The most that a pass can give over a plain step, if drafts are as long as they may be."""
    return _best(costs, rows, [(rate, None) for rate in rates])[0]


def _best(costs: Iterable[tuple[int, float]], rows: int, drafts: Sequence[tuple[float, int | None]]) -> tuple[float, int]:
    best = (1.0, 1)
    for length, cost in costs:
        counts = [(rate, length - 1 if count is None else min(count, length - 1)) for rate, count in drafts]
        gained = sum(tokens_of_draft(rate, count) for rate, count in counts)
        gain = (rows + gained) / rows / cost
        if gain >= PAYS and gain > best[0]:
            best = (gain, length)
    return best
