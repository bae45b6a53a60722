"""Speculation in simulated time: rows with texts of known kinds, passes of known cost, no model."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from millstream.engine.generation.speculation.choice import Outcome, best_length
from millstream.engine.generation.speculation.depth import SpeculationDepth
from millstream.engine.generation.speculation.sources import drafter_of

PLAIN = 0.01
"""Seconds of a plain step with one row."""


@dataclass(frozen=True)
class Kind:
    """A kind of text: how often a drafter has a draft for it, and how often a token of that is right. The drafter may
    be a source: see `speculation/sources.py`."""

    offer: float
    rate: float
    drafter: str = "prompt-lookup"


PROSE = Kind(0.4, 0.15)
NO_DRAFTS = Kind(0.0, 0.0)
COPY = Kind(0.98, 0.97)


@dataclass
class Row:
    """A request: its text, as (tokens, kind)."""

    number: int
    text: Sequence[tuple[int, Kind]]
    done: int = 0
    guess: list[bool] | None = None
    kinds: list[Kind] = field(init=False)

    def __post_init__(self) -> None:
        self.kinds = [kind for count, kind in self.text for _ in range(count)]

    @property
    def drafters(self) -> list[str]:
        return list({drafter_of(kind.drafter): None for _, kind in self.text})

    @property
    def kind(self) -> Kind:
        return self.kinds[min(self.done, len(self.kinds) - 1)]


class Machine:
    """Steps of rows by a `SpeculationDepth`, as the scheduler and the backend make them."""

    def __init__(
        self,
        depth: SpeculationDepth,
        cost: Callable[[int, int], float],
        *,
        lost_overlap: float = 0.02,
        noise: float = 0.03,
        seed: int = 0,
    ) -> None:
        """`cost` (rows, length): of a pass, relative to a plain step. `lost_overlap`: of a plain step, what a step
        costs more that cannot be launched before the last one is read."""
        self.depth = depth
        self._cost = cost
        self._lost = lost_overlap
        self._noise = noise
        self._draw = random.Random(seed)
        self.seconds = self.plain_seconds = 0.0
        self.lengths: list[int] = []

    @property
    def gain(self) -> float:
        """Tokens per second over those of plain steps."""
        return self.plain_seconds / self.seconds

    def run(self, rows: Sequence[Row]) -> None:
        """Until all have ended. Time without speculation is that of as many plain steps."""
        running = list(rows)
        while running:
            before = [row.done for row in running]
            self._step(running)
            count = len(running)
            self.plain_seconds += PLAIN * sum(row.done - at for row, at in zip(running, before, strict=True)) / count
            for row in running:
                if row.done >= len(row.kinds):
                    self.depth.forget(row.number)
            running = [row for row in running if row.done < len(row.kinds)]

    def _step(self, rows: list[Row]) -> None:
        choice = self.depth.choose({row.number: row.drafters for row in rows}, len(rows))
        drafts: dict[int, list[bool]] = {}
        if choice.odds is not None:
            drafts = {
                row.number: self._draft(row, choice.depth) for row in rows if self._draw.random() < row.kind.offer
            }
        length = 1
        if choice.odds is not None and drafts:
            kinds = {row.number: row.kind.drafter for row in rows}
            found = {number: (kinds[number], len(draft)) for number, draft in drafts.items()}
            length = best_length(choice.odds, len(rows), found)
        self.lengths.append(length)
        outcomes, guessed = [], []
        gained = 0
        for row in rows:
            accepted = 0
            if length > 1 and row.number in drafts:
                draft = drafts[row.number][: length - 1]
                accepted = next((count for count, right in enumerate(draft) if not right), len(draft))
                outcomes.append(Outcome(row.number, row.kind.drafter, len(draft), accepted))
            guessed += self._compare(row, row.number in choice.guess and length == 1)
            row.done += 1 + accepted
            gained += 1 + accepted
        seconds = PLAIN * self._cost(len(rows), length) * self._draw.uniform(1 - self._noise, 1 + self._noise)
        took = seconds + PLAIN * self._lost * (length > 1)
        self.seconds += took
        tokens = gained / len(rows)
        self.depth.observe(
            outcomes,
            guessed=guessed,
            length=length,
            rows=len(rows),
            tokens=tokens,
            seconds=seconds,
            wall=(tokens, took),
        )

    def _draft(self, row: Row, count: int) -> list[bool]:
        return [self._draw.random() < row.kind.rate for _ in range(count)]

    def _compare(self, row: Row, begin: bool) -> list[Outcome]:
        """One plain token: what it says of the row's guess."""
        if row.guess is None and begin and row.kind.drafter not in ("mtp", "draft-model"):
            row.guess = self._draft(row, 8) if self._draw.random() < row.kind.offer else None
            return []
        if not row.guess:
            row.guess = None
            return []
        right = row.guess.pop(0)
        if not right:
            row.guess = None
        return [Outcome(row.number, row.kind.drafter, 1, int(right))]
