"""Decides whether the rows of a step speculate: where it pays, and nearly not at all where it does not.

Rows speculate as long as that gives more tokens per second of wall clock than plain steps, over windows of 16 steps.
Where a window lost, plain steps follow until its loss is a hundredth of their time, and twice as many for each
window more that lost; then it is tried again.

Which passes look as if they pay is learned besides: how often each drafter is right for each row, and what passes cost
by their length. Drafts that cost no forward pass are also compared with what plain steps give, so their worth is known
before any pass verifies one: a row that begins to repeat its prompt speculates after a few tokens, prose never.
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

WINDOW = 16
"""Steps whose tokens per second are compared with those of plain steps."""
LOSS = 1.0
"""In plain steps: a window that has lost so much ends."""
SHARE = 0.01
"""Of the time of the plain steps after a window, what it lost."""
LONGEST_WAIT = 1024
"""Plain steps after a window that lost, at most."""
CHANGED = 1.5
"""Passes that promise so many times what those did that lost are tried at once: the texts have changed."""
FEW_ROWS, FIRST_WAIT = 8, 64
"""With more rows so many plain steps come before the first window: there speculation often loses."""
OUTLIER = 2
"""A step that took so many times as long as its tokens one by one is no measure, and ends a window: the first of its
shape compiles kernels, and others use the machine."""

GUESSES = 16
"""Rows whose drafts are compared in one plain step, at most."""
STANDING = 15
"""With many rows a choice stands for a quarter as many further steps, up to so many: it takes time for every row. It
also stands for so long that choosing takes no more than a two-hundredth of the time."""
CHOOSING_SECONDS = 30e-6
"""What a choice takes in Python, about."""
ASKING = 0.005
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


class _Trial:
    """With some number of rows: whether passes that verify drafts have paid."""

    def __init__(self, rows: int) -> None:
        self.wait = 0 if rows <= FEW_ROWS else FIRST_WAIT
        """Plain steps before passes are tried again."""
        self.lost = 0
        """Windows that lost, one after the other."""
        self._steps = 0
        self._ahead = 0.0
        """In plain steps: what the window has gained so far."""
        self._promised = 1.0
        """What the last passes were expected to gain."""

    def allows(self, gain: float) -> bool:
        """Whether passes that are expected to gain so much may run: while they wait, only if that is far more than what
        lost. Then texts have changed."""
        if self.wait and gain < CHANGED * self._promised:
            return False
        self._promised = gain
        return True

    def count(self, tokens: float, seconds: float, *, plain: float, length: int, speculative: bool) -> bool:
        """A step gave each row so many tokens on average. Returns whether a window has lost. `plain`: seconds of a
        plain step; `speculative`: not one of these."""
        if not self._steps and not speculative:
            self.wait = max(0, self.wait - 1)
            return False
        self._steps += 1
        if (cost := seconds / plain) > OUTLIER * max(tokens, length):
            cost = tokens + LOSS
        self._ahead += tokens - cost
        if self._steps < WINDOW and self._ahead > -LOSS:
            return False
        lost = max(0.0, -self._ahead)
        self.lost = self.lost + 1 if lost else 0
        self.wait = min(LONGEST_WAIT, int(lost / SHARE) << min(self.lost - 1, 16)) if lost else 0
        self._steps, self._ahead = 0, 0.0
        return lost > 0


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
        self._trials: dict[int, _Trial] = {}
        """By rows, in powers of two."""
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
        costs, trial = self._lengths(batch), self._trial(batch)
        # Where no pass would pay even if every draft were right, drafts are not worth a look.
        hopeful = any(length >= PAYS * cost for length, cost in costs)
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
        length, gain = best_if_drafted(costs, batch, best.values())
        if length == 1 or not trial.allows(gain):
            return Choice(guess=guess)
        if self._costly:  # each token of a draft takes time, whether or not it is verified
            costs = [each for each in costs if each[0] <= length]
        return Choice(costs[-1][0] - 1, Odds(tuple(costs), rates), guess)

    def _rate(self, row: int, source: str) -> float:
        """Of a drafter that only passes tell about, what is likely; of others, what is sure."""
        known = self._acceptance(row, source)
        return known.rate if source in COSTLY else known.sure_rate

    def observe(
        self,
        outcomes: Iterable[Outcome],
        *,
        guessed: Iterable[Outcome] = (),
        length: int = 1,
        rows: int = 0,
        tokens: float = 0.0,
        seconds: float | None = None,
        wall: tuple[float, float] | None = None,
        waited: bool = False,
        asking: float = 0.0,
    ) -> None:
        """After a step: what became of drafts and of guesses, how many tokens long the pass was, its rows, how many
        tokens each of them gained in it on average, and what it took by itself; None if something else ran beside it,
        or before. `wall`: how many tokens each row was given, also of the step before, and the seconds of all that;
        None as before. `waited`: for the step before, to draft after it. `asking`: the seconds that comparing drafts
        took, and asking for some in vain."""
        for outcome in (*outcomes, *guessed):
            self._learn(outcome)
        for outcome in outcomes:
            count = self._counts.setdefault(drafter_of(outcome.source), [0, 0])
            count[0] += outcome.proposed
            count[1] += outcome.accepted
        self._owed = max(0.0, self._owed + asking - ASKING * (self._costs.plain(rows) or 0.0))
        if self._choice.depth:
            self._in_vain = length == 1
        if length > 1:
            self._passes += 1
        if not rows:
            return
        plain, counts = self._costs.plain(rows), True
        if seconds is not None:
            if not self._costs.knows(rows, length):
                self._standing = 0
            if plain and length > 1:
                seconds = min(seconds, OUTLIER * length * plain)
                self._gain += 0.05 * (tokens * plain / seconds - self._gain)
            counts = self._costs.observe(rows, length, seconds)
        if plain and wall and counts:
            lost = self._trial(rows).count(*wall, plain=plain, length=length, speculative=waited or length > 1)
            self._standing = 0 if lost else self._standing

    def _trial(self, rows: int) -> _Trial:
        return self._trials.setdefault((rows - 1).bit_length(), _Trial(rows))

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
        costs = self._costs.relative(batch, [length for length in lengths if not self._too_wide(batch, length)])
        if self._trial(batch).lost and costs:  # perhaps it was measured while something else used the machine
            costs[0] = (costs[0][0], 1 + SLOPE * (costs[0][0] - 1))
        return costs

    def _too_wide(self, batch: int, length: int) -> bool:
        widest = self._widest(batch)
        return widest is not None and batch * length > widest

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
