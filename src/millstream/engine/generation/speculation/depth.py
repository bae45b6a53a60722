"""Decides how deep the rows of a step speculate: as deep as pays, and not at all where it does not.

A step is one pass over all rows, as long as the longest draft. So depth is decided for the batch, and a row that never
gains takes part with its one token. Where the best depth gains nothing, speculation is parked, for longer each time, and
then tried again for a few steps: a trial costs little of the steps between.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from millstream.engine.generation.speculation.acceptance import Acceptance
from millstream.engine.generation.speculation.cost import StepCosts

DEPTHS = (1, 2, 4, 8)
"""Few, because each length of a step is compiled, and its cost is learned, by itself."""
PAYS = 1.03
"""How many times as many tokens per second a depth must give to be worth it."""
TRIAL = 4
"""Steps of a trial."""
SHORTEST_PARK, LONGEST_PARK = 64, 2048
"""Steps before the next trial."""


class SpeculationDepth:
    """Pure. Ask `choose` before each step, tell `observe` after it."""

    def __init__(self, costs: StepCosts | None = None, *, most: int = DEPTHS[-1]) -> None:
        self._costs = costs or StepCosts()
        self._depths = tuple(depth for depth in DEPTHS if depth <= most)
        self._rows: dict[int, Acceptance] = {}
        self._parked = 0
        """Steps until the next trial."""
        self._park = SHORTEST_PARK
        self._trial = TRIAL

    def choose(self, rows: Collection[int]) -> int:
        """How many tokens of a draft the rows may try in the next step; 0: none. `rows`: ids of requests."""
        if not rows or not self._depths:
            return 0
        self._rows = {row: self._rows.get(row) or Acceptance() for row in rows}
        plain = self._costs.seconds(len(rows), 1)
        if plain is None or not self._costs.knows(len(rows), 1):
            return 0  # without the cost of a plain step nothing can be compared
        if self._parked:
            self._parked -= 1
            self._trial = TRIAL
            return 0
        gain, depth = max((self._gain(len(rows), depth, plain), depth) for depth in self._depths)
        if gain >= PAYS:
            return depth
        if self._trial:
            self._trial -= 1
            return self._depths[0] if depth not in self._depths else depth
        self._parked, self._park = self._park, min(2 * self._park, LONGEST_PARK)
        return 0

    def observe(self, outcomes: Mapping[int, tuple[int, int]], length: int, seconds: float) -> None:
        """A step without prefill: for each row how many tokens it tried and how many were right, how many tokens long
        the pass was, and what it took."""
        if not outcomes:
            return
        self._costs.observe(len(outcomes), length, seconds)
        if length == 1:
            return
        for row, (proposed, accepted) in outcomes.items():
            self._rows.setdefault(row, Acceptance()).observe(proposed, accepted)
        plain = self._costs.seconds(len(outcomes), 1)
        if plain is not None and self._gain(len(outcomes), length - 1, plain) >= PAYS:
            self._park = SHORTEST_PARK

    def _gain(self, rows: int, depth: int, plain: float) -> float:
        """Tokens per second with this depth over those without speculation."""
        cost = self._costs.seconds(rows, depth + 1)
        assert cost is not None, "a plain step with so many rows is known"
        expected = sum(row.expected(depth) for row in self._rows.values()) / max(1, len(self._rows))
        return expected * plain / cost
