"""Decides whether the rows of a step speculate: where it pays, and nearly not at all where it does not.

Three things are learned: how often each drafter is right for each row, what passes cost by their length, and what
speculation has gained or lost so far. Drafts that cost no forward pass are also compared with what plain steps give, so
their worth is known before any pass verifies one: a row that begins to repeat its prompt speculates after a few tokens,
and prose never does. All other trials are paid from a **credit**: every step adds a hundredth of a plain step to it,
every pass adds what it gained or takes what it lost, and a pass that is not sure to pay may not risk more than is left.
So where speculation loses, it costs about a hundredth, however long the texts are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from millstream.engine.generation.speculation.acceptance import Acceptance
from millstream.engine.generation.speculation.choice import PAYS, Odds, Outcome, best_gain
from millstream.engine.generation.speculation.cost import SLOPE, StepCosts
from millstream.engine.generation.speculation.lengths import LENGTHS
from millstream.engine.messages import Speculated

COSTLY = frozenset({"mtp", "draft-model"})
"""Drafters that run forward passes: what they are worth, only a trial tells."""
PRIOR, COSTLY_PRIOR = 0.3, 0.7
"""How often a token of a draft is right, before anything is known."""
LEARNED = 0.02
"""The weight of one draft in what is known of its drafter over all rows: the prior of new ones."""

CREDIT, MOST_CREDIT, LEAST_CREDIT = 3.0, 12.0, -4.0
"""In plain steps: at first; at most, so that old gains do not pay for new losses; and so little that nothing is
tried."""
DOUBT = 0.25
"""The share of a full credit that is risked to measure again what passes cost."""
INTEREST = 0.01
"""What every step adds to the credit: the share of time that trials may cost."""

GUESSES = 16
"""Rows whose drafts are compared in one plain step, at most."""
LONG_ROWS = 4
"""The longest passes are for so few rows."""


@dataclass(frozen=True, slots=True)
class Choice:
    """For the next step: how long drafts may be, which passes pay, and which rows' drafts are only compared."""

    depth: int = 0
    odds: Odds | None = None
    guess: tuple[int, ...] = ()


PLAIN = Choice()


class SpeculationDepth:
    """Pure. Ask `choose` before each step, tell `observe` after it."""

    def __init__(self, drafters: Sequence[str], costs: StepCosts | None = None, *, most: int = LENGTHS[-1] - 1) -> None:
        """`most`: tokens of a draft."""
        self._drafters = tuple(drafters)
        self._costly = any(name in COSTLY for name in drafters)
        self._costs = costs or StepCosts()
        self._most = most
        self._priors = {name: COSTLY_PRIOR if name in COSTLY else PRIOR for name in drafters}
        self._rows: dict[int, dict[str, Acceptance]] = {}
        self._guessed = 0
        """The number of the row that is next to be compared."""
        self._credit = CREDIT
        self._passes = 0
        self._counts: dict[str, list[int]] = {name: [0, 0] for name in drafters}
        self._gain = 1.0

    @property
    def speculated(self) -> Speculated:
        counts = tuple((name, proposed, accepted) for name, (proposed, accepted) in self._counts.items())
        return Speculated(self._passes, counts, round(self._gain, 2))

    def choose(self, rows: Collection[int], batch: int) -> Choice:
        """`rows`: requests that may speculate; `batch`: how many rows the step has."""
        if not rows or not self._drafters or self._costs.plain(batch) is None:
            return PLAIN  # without the cost of a plain step nothing can be compared
        costs = self._lengths(batch)
        sure = [(length, cost) for length, cost in costs if self._costs.knows(batch, length) or self._affords(cost)]
        odds = self._odds(rows, sure, sure_rates=True)
        if self._credit <= LEAST_CREDIT or not self._pays(odds, batch):
            odds = self._odds(rows, [each for each in costs if self._affords(each[1])], sure_rates=False)
        if not self._pays(odds, batch) and self._credit == MOST_CREDIT:
            odds = self._odds(rows, self._doubted(costs), sure_rates=False)
        if not self._pays(odds, batch):
            return Choice(guess=self._to_guess(rows))
        return Choice(max(length for length, _ in odds.costs) - 1, odds, self._to_guess(rows))

    def observe(
        self,
        outcomes: Iterable[Outcome],
        *,
        guessed: Iterable[Outcome] = (),
        length: int = 1,
        rows: int = 0,
        tokens: float = 0.0,
        seconds: float | None = None,
    ) -> None:
        """After a step: what became of drafts and of guesses, how many tokens long the pass was, its rows, how many
        tokens each of them gained in it on average, and what it took; None if something else ran beside it."""
        for outcome in (*outcomes, *guessed):
            self._learn(outcome)
        for outcome in outcomes:
            count = self._counts.setdefault(outcome.drafter, [0, 0])
            count[0] += outcome.proposed
            count[1] += outcome.accepted
        self._credit = min(MOST_CREDIT, self._credit + INTEREST)
        if length > 1:
            self._passes += 1
        if seconds is None or not rows:
            return
        self._costs.observe(rows, length, seconds)
        plain = self._costs.plain(rows)
        if length > 1 and plain:
            self._credit = min(MOST_CREDIT, self._credit + tokens - seconds / plain)
            self._gain += 0.05 * (tokens * plain / seconds - self._gain)

    def forget(self, request_id: int) -> None:
        """A request has ended."""
        self._rows.pop(request_id, None)

    def _learn(self, outcome: Outcome) -> None:
        tried = min(outcome.proposed, outcome.accepted + 1)
        if not tried:
            return
        known = self._acceptance(outcome.request_id, outcome.drafter)
        known.observe(outcome.proposed, outcome.accepted)
        prior = self._priors[outcome.drafter]
        self._priors[outcome.drafter] = prior + LEARNED * (outcome.accepted / tried - prior)

    def _acceptance(self, request_id: int, drafter: str) -> Acceptance:
        row = self._rows.setdefault(request_id, {})
        if drafter not in row:
            row[drafter] = Acceptance(self._priors.setdefault(drafter, PRIOR))
        return row[drafter]

    def _lengths(self, batch: int) -> list[tuple[int, float]]:
        """The passes that there may be, and what they cost relative to a plain step. Of those that are longer than any
        that was seen, one: what it costs tells about the others."""
        most = 1 + (self._most if batch <= LONG_ROWS else LENGTHS[-2] - 1)
        next_longer = next((length for length in LENGTHS if length > self._costs.longest), most)
        lengths = [length for length in LENGTHS[1:] if length <= min(most, next_longer)]
        return [(length, self._costs.relative(batch, length)) for length in lengths]

    def _doubted(self, costs: list[tuple[int, float]]) -> list[tuple[int, float]]:
        """What passes would cost if their costs were measured while something else used the machine: those that risk
        little of the credit are tried again."""
        return [(length, 1 + SLOPE * (length - 1)) for length, cost in costs if cost - 1 <= DOUBT * self._credit]

    def _affords(self, cost: float) -> bool:
        """Whether a pass may lose all that it costs beyond a plain step."""
        return cost - 1 <= self._credit

    def _odds(self, rows: Collection[int], costs: list[tuple[int, float]], *, sure_rates: bool) -> Odds:
        rates = []
        for row in rows:
            for drafter in self._drafters:
                known = self._acceptance(row, drafter)
                rates.append((row, drafter, known.sure_rate if sure_rates else known.rate))
        return Odds(tuple(costs), tuple(rates))

    def _pays(self, odds: Odds, batch: int) -> bool:
        """Whether some pass pays if all rows have drafts, each by the best of its drafters."""
        best: dict[int, float] = {}
        for row, _, rate in odds.rates:
            best[row] = max(rate, best.get(row, 0.0))
        return best_gain(odds.costs, batch, best.values()) >= PAYS

    def _to_guess(self, rows: Collection[int]) -> tuple[int, ...]:
        """Some rows in turn."""
        every = list(rows)
        if len(every) <= GUESSES:
            return tuple(every)
        first = self._guessed % len(every)
        self._guessed = first + GUESSES
        return tuple((every * 2)[first : first + GUESSES])
