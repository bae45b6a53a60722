"""How often a row's drafts are right: learned from its own steps."""

from __future__ import annotations

DECAY = 0.95
"""The weight of earlier steps when a step is observed: a text changes its kind."""
PRIOR_RIGHT, PRIOR_ALL = 0.5, 1.0
"""What a row is credited with before anything is known of it."""


class Acceptance:
    """Of one row. A draft's tokens are tried one after another until one is wrong, so what counts is how many were
    tried and how many of these were right."""

    __slots__ = ("_offered", "_right", "_steps", "_tried")

    def __init__(self) -> None:
        self._right = self._tried = 0.0
        self._offered = self._steps = 0.0

    def observe(self, proposed: int, accepted: int) -> None:
        """A step tried `proposed` tokens, of which the first `accepted` were right. 0 proposed: there was no draft."""
        self._steps = DECAY * self._steps + 1
        self._offered = DECAY * self._offered + (proposed > 0)
        if proposed:
            self._right = DECAY * self._right + accepted
            self._tried = DECAY * self._tried + min(proposed, accepted + 1)

    @property
    def rate(self) -> float:
        """The chance that a token of a draft is right if all before it were."""
        return (self._right + PRIOR_RIGHT) / (self._tried + PRIOR_ALL)

    @property
    def offer(self) -> float:
        """The chance that there is a draft at all."""
        return (self._offered + 1) / (self._steps + 1)

    def expected(self, depth: int) -> float:
        """Tokens that a step gives on average, if it tries up to `depth` of a draft."""
        rate = min(self.rate, 0.999)
        drafted = rate * (1 - rate**depth) / (1 - rate)
        return 1 + self.offer * drafted
