"""Decides whether the rows of a step speculate: where it pays, and nearly not at all where it does not.

Three things are learned: how often each drafter is right for each row, what passes cost by their length, and what
speculation has gained or lost so far. Drafts that cost no forward pass are also compared with what plain steps give, so
their worth is known before any pass verifies one: a row that begins to repeat its prompt speculates after a few tokens,
and prose never does. All other trials are paid from a **credit**: every step adds a hundredth of a plain step to it,
every pass adds what it gained or takes what it lost, and a pass that is not sure to pay may not risk more than is left.
So where speculation loses, it costs about a hundredth, however long the texts are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from millstream.engine.generation.messages import Generate
from millstream.engine.generation.speculation.acceptance import Acceptance
from millstream.engine.generation.speculation.choice import PAYS, Odds, Outcome, best_if_drafted
from millstream.engine.generation.speculation.cost import SLOPE, StepCosts
from millstream.engine.generation.speculation.lengths import LENGTHS, longest_pass
from millstream.engine.generation.speculation.sources import drafter_of, sources_of
from millstream.engine.messages import Speculated

COSTLY = frozenset({"mtp", "draft-model"})
"""Drafters that run forward passes: what they are worth, only a trial tells."""
PRIOR = 0.3
PRIORS = {"grammar": 0.9, "prediction": 0.8, "mtp": 0.7, "draft-model": 0.7, "prompt-lookup": 0.5}
"""How often a token of a draft is right, by its source, before anything is known."""
LEARNED = 0.02
"""The weight of one draft in what is known of its source over all rows: the prior of new ones."""

CREDIT, MOST_CREDIT, LEAST_CREDIT = 3.0, 12.0, 1.0
"""In plain steps: at first; at most, so that old gains do not pay for new losses; and the least to try something."""
OUTLIER = 2
"""A pass that took so many times as long as its tokens one by one counts as if it had taken just that: the first of a
length may compile kernels, and that must not bury it."""
DOUBT = 0.25
"""The share of a full credit that is risked to measure again what passes cost."""
INTEREST = 0.01
"""What every step adds to the credit: the share of time that trials may cost."""

GUESSES = 16
"""Rows whose drafts are compared in one plain step, at most."""
STANDING = 15
"""With many rows a choice stands for a quarter as many further steps, up to so many: it takes time for every row. It
also stands for so long that choosing takes no more than a two-hundredth of the time."""
CHOOSING_SECONDS = 30e-6
"""What a choice takes in Python, about."""
ASKING = 0.01
"""The share of time that comparing drafts in plain steps may take, and asking for drafts of which none pays."""
UNSEEN = 2
"""How many lengths beyond the longest that was seen may be tried."""


@dataclass(frozen=True, slots=True)
class Choice:
    """For the next step: how long drafts may be, which passes pay, and which rows' drafts are only compared."""

    depth: int = 0
    odds: Odds | None = None
    guess: tuple[int, ...] = ()


PLAIN = Choice()


class SpeculationDepth:
    """Pure. Ask `choose` before each step, tell `observe` after it."""

    def __init__(
        self,
        drafters: Sequence[str],
        costs: StepCosts | None = None,
        *,
        most: int = LENGTHS[-1] - 1,
        widest: Callable[[int], int | None] = lambda rows: None,
    ) -> None:
        """`most`: tokens of a draft. `widest`: tokens of a pass of some rows, of all of them together; None: any
        number."""
        self._widest = widest
        self._drafters = tuple(drafters)
        self._costly = any(name in COSTLY for name in drafters)
        self._applying: dict[tuple[bool, bool], tuple[str, ...]] = {}
        """Drafters by whether a request has a grammar, and a prediction."""
        self._costs = costs or StepCosts()
        self._most = most
        self._priors: dict[str, float] = {}
        self._rows: dict[int, dict[str, Acceptance]] = {}
        self._guessed = 0
        """The number of the row that is next to be compared."""
        self._choice, self._standing = PLAIN, 0
        self._owed = 0.0
        """Seconds that asking has taken beyond its share."""
        self._in_vain = False
        """True if the last drafts that were planned came to nothing."""
        self._credit = CREDIT
        self._passes = 0
        self._counts: dict[str, list[int]] = {name: [0, 0] for name in drafters}
        self._gain = 1.0

    @property
    def speculated(self) -> Speculated:
        counts = tuple((name, proposed, accepted) for name, (proposed, accepted) in self._counts.items())
        return Speculated(self._passes, counts, round(self._gain, 2))

    def drafters_of(self, submit: Generate) -> tuple[str, ...]:
        """Those that may have something for this request."""
        key = (submit.grammar is not None, bool(submit.prediction))
        if key not in self._applying:
            absent = {name for name, has in zip(("grammar", "prediction"), key, strict=True) if not has}
            self._applying[key] = tuple(name for name in self._drafters if name not in absent)
        return self._applying[key]

    def choose(self, rows: Mapping[int, Collection[str]], batch: int) -> Choice:
        """`rows`: requests that may speculate, and the drafters that may have something for each; `batch`: how many
        rows the step has."""
        if not rows or not self._drafters or (plain := self._costs.plain(batch)) is None:
            return PLAIN  # without the cost of a plain step nothing can be compared
        if self._owed and self._in_vain and not self._costly:
            return PLAIN
        if self._standing:
            self._standing -= 1
            return self._choice if not self._choice.guess else replace(self._choice, guess=self._to_guess(rows))
        self._standing = min(max(len(rows) // 4, int(CHOOSING_SECONDS / (0.005 * plain))), STANDING)
        self._choice = self._decide(rows, batch)
        return self._choice

    @property
    def stands_plain(self) -> bool:
        """True if the last choice, a plain step in which nothing is compared, stands: nobody need ask."""
        if not self._standing or self._choice.depth or self._choice.guess:
            return False
        self._standing -= 1
        return True

    def _decide(self, rows: Mapping[int, Collection[str]], batch: int) -> Choice:
        costs = self._lengths(batch)
        # Where no pass would pay even if every draft were right, drafts are not worth a look, but for doubts below.
        hopeful = any(length >= PAYS * cost or self._credit == MOST_CREDIT for length, cost in costs)
        guess = self._to_guess(rows) if hopeful else ()
        rates = tuple(
            (row, source, self._rate(row, source))
            for row, drafters in rows.items()
            for drafter in drafters
            for source in sources_of(drafter)
        )
        best: dict[int, float] = {}
        for row, _, rate in rates:
            if rate > best.get(row, 0.0):
                best[row] = rate
        choices = [each for each in costs if self._costs.knows(batch, each[0]) or self._affords(each[1])]
        length = best_if_drafted(choices, batch, best.values())
        if length == 1 and self._credit == MOST_CREDIT:
            choices = self._doubted(costs)
            length = best_if_drafted(choices, batch, best.values())
        if length == 1:
            return Choice(guess=guess)
        if self._costly:  # each token of a draft takes time, whether or not it is verified
            choices = [each for each in choices if each[0] <= length]
        return Choice(choices[-1][0] - 1, Odds(tuple(choices), rates), guess)

    def _rate(self, row: int, source: str) -> float:
        """Of a drafter that only passes tell about, what is likely, as long as there is credit to try it; of others,
        what is sure."""
        known = self._acceptance(row, source)
        return known.rate if source in COSTLY and self._credit >= LEAST_CREDIT else known.sure_rate

    def observe(
        self,
        outcomes: Iterable[Outcome],
        *,
        guessed: Iterable[Outcome] = (),
        length: int = 1,
        rows: int = 0,
        tokens: float = 0.0,
        seconds: float | None = None,
        asking: float = 0.0,
    ) -> None:
        """After a step: what became of drafts and of guesses, how many tokens long the pass was, its rows, how many
        tokens each of them gained in it on average, and what it took; None if something else ran beside it. `asking`:
        the seconds of it that comparing drafts took, and asking for some in vain."""
        for outcome in (*outcomes, *guessed):
            self._learn(outcome)
        for outcome in outcomes:
            count = self._counts.setdefault(drafter_of(outcome.source), [0, 0])
            count[0] += outcome.proposed
            count[1] += outcome.accepted
        self._credit = min(MOST_CREDIT, self._credit + INTEREST)
        self._owed = max(0.0, self._owed + asking - ASKING * (self._costs.plain(rows) or 0.0))
        if self._choice.depth:
            self._in_vain = length == 1
        if length > 1:
            self._passes += 1
        if seconds is None or not rows:
            return
        if not self._costs.knows(rows, length):
            self._standing = 0
        plain = self._costs.plain(rows)
        if plain and length > 1:
            seconds = min(seconds, OUTLIER * length * plain)
        counts = self._costs.observe(rows, length, seconds)
        if length > 1 and plain:
            # What is only for the first of its kind comes once, and says nothing of the others.
            self._credit = min(MOST_CREDIT, self._credit + tokens - (seconds / plain if counts else length))
            self._gain += 0.05 * (tokens * plain / seconds - self._gain)

    def forget(self, request_id: int) -> None:
        """A request has ended."""
        self._rows.pop(request_id, None)

    def _learn(self, outcome: Outcome) -> None:
        tried = min(outcome.proposed, outcome.accepted + 1)
        if not tried:
            return
        known = self._acceptance(outcome.request_id, outcome.source)
        known.observe(outcome.proposed, outcome.accepted)
        prior = self._prior(outcome.source)
        self._priors[outcome.source] = prior + LEARNED * (outcome.accepted / tried - prior)

    def _acceptance(self, request_id: int, source: str) -> Acceptance:
        row = self._rows.setdefault(request_id, {})
        if source not in row:
            row[source] = Acceptance(self._prior(source))
        return row[source]

    def _prior(self, source: str) -> float:
        return self._priors.setdefault(source, PRIORS.get(source, PRIOR))

    def _lengths(self, batch: int) -> list[tuple[int, float]]:
        """The passes that there may be, and what they cost relative to a plain step. Of those that are longer than any
        that was seen, two: what they cost tells about the others. Where the second token costs a whole step and further
        ones nothing, the shorter of them would never look as if it paid."""
        most = min(1 + self._most, longest_pass(batch))
        longer = [length for length in LENGTHS[1:] if length > self._costs.longest]
        lengths = [length for length in LENGTHS[1:] if length <= most and length not in longer[UNSEEN:]]
        return self._costs.relative(batch, [length for length in lengths if not self._too_wide(batch, length)])

    def _too_wide(self, batch: int, length: int) -> bool:
        widest = self._widest(batch)
        return widest is not None and batch * length > widest

    def _doubted(self, costs: list[tuple[int, float]]) -> list[tuple[int, float]]:
        """What passes would cost if their costs were measured while something else used the machine: the shortest is
        tried again, and others that risk little of the credit."""
        risk = DOUBT * self._credit
        return [
            (length, 1 + SLOPE * (length - 1))
            for length, cost in costs
            if cost - 1 <= (self._credit if length == LENGTHS[1] else risk)
        ]

    def _affords(self, cost: float) -> bool:
        """Whether a pass may lose all that it costs beyond a plain step."""
        return cost - 1 <= self._credit

    def _to_guess(self, rows: Collection[int]) -> tuple[int, ...]:
        """Some rows in turn, unless asking has taken too long lately."""
        if self._owed:
            return ()
        every = list(rows)
        if len(every) <= GUESSES:
            return tuple(every)
        first = self._guessed % len(every)
        self._guessed = first + GUESSES
        return tuple((every * 2)[first : first + GUESSES])
