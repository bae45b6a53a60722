"""How often drafts are right: learned from passes that verified them, and from guesses that plain steps confirmed."""

from __future__ import annotations

import math

DECAY = 0.95
"""The weight of earlier drafts when one more is observed: a text changes its kind."""
PRIOR_TOKENS = 2.0
"""How many tokens the prior counts for."""


class Acceptance:
    """Of one row by one drafter. A draft's tokens are tried one after another until one is wrong, so what counts is how
    many were tried and how many of these were right."""

    __slots__ = ("_prior", "_right", "_tried", "rate", "sure_rate")

    def __init__(self, prior: float) -> None:
        """`prior`: the rate that is assumed while nothing is known."""
        self._prior = prior
        self._right = self._tried = 0.0
        self._conclude()

    def observe(self, proposed: int, accepted: int) -> None:
        """Of a draft of `proposed` tokens, the first `accepted` were right."""
        self._right = DECAY * self._right + accepted
        self._tried = DECAY * self._tried + min(proposed, accepted + 1)
        self._conclude()

    def _conclude(self) -> None:
        self.rate = rate = (self._right + PRIOR_TOKENS * self._prior) / (self._tried + PRIOR_TOKENS)
        """The chance that a token of a draft is right if all before it were."""
        self.sure_rate = max(0.0, rate - math.sqrt(rate * (1 - rate) / (self._tried + 1)))
        """A rate that it hardly is below: lower by a standard deviation, so the more the less is known."""
