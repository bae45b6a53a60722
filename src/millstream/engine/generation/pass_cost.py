"""What a prefill pass costs, by its tokens. Pure: it is told how long passes took.

The shape of the curve comes from the calibration: a pass of few tokens may cost nearly as much as one of many, by its
launches, by reading or unpacking weights, by experts that are read for any of its tokens. What is followed at run time
is by how much passes beside rows differ from it: the host works on one while the device decodes, and their rows join.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

_FOLLOWING = 0.25
_STEPS_AFTER = 2
"""A backend reads the tokens of the step before: those that wait for a pass come two steps later."""

LEAST_FACTOR = 0.85
"""A pass is never believed to cost less than this share of what it cost alone: a short one hides behind the rows' own
time, and a long one does not."""


class PassCost:
    """Seconds that a pass adds to the steps that compute it."""

    def __init__(self, chunks: Sequence[tuple[int, float]] = ()) -> None:
        """`chunks`: (tokens, seconds) as they were measured without rows, shortest first."""
        # A longer one is never cheaper: what seems so was disturbed when it was measured.
        seconds = [cost for _, cost in chunks]
        self._lengths = [tokens for tokens, _ in chunks]
        self._seconds = [min(seconds[index:]) for index in range(len(seconds))]
        self._factor = 1.0
        self._last = 1.0
        self._left = 0
        """Steps that still show what passes cost."""
        self._expected = self._added = 0.0

    @property
    def known(self) -> bool:
        return bool(self._lengths)

    def seconds(self, tokens: float) -> float:
        """What a pass of so many tokens costs. What padding adds is followed like everything else."""
        return self._factor * self._curve(tokens)

    def tokens_in(self, seconds: float) -> int:
        """How many tokens a pass has that costs so much; 0 if none is so cheap."""
        alone = seconds / self._factor
        if alone < self._seconds[0]:
            return 0
        if alone >= self._seconds[-1]:
            return self._lengths[-1] + int((alone - self._seconds[-1]) / self._slope)
        high = bisect.bisect_right(self._seconds, alone)
        (low_tokens, low), (high_tokens, most) = (
            (self._lengths[index], self._seconds[index]) for index in (high - 1, high)
        )
        return low_tokens + int((high_tokens - low_tokens) * (alone - low) / (most - low))

    def observe(self, *, tokens: float, seconds: float, decode: float, prefilling: bool) -> None:
        """A step of `decode` seconds of rows' own time took `seconds`, and a pass of `tokens` began in it (0: none).
        `prefilling`: a later step goes on with one. What a pass costs may show in the steps after it, where its rows
        join, so passes that follow each other count together."""
        if not self.known or (not tokens and not self._left):
            return
        self._left = _STEPS_AFTER if tokens or prefilling else self._left - 1
        self._expected += self._curve(tokens) if tokens else 0.0
        self._added += seconds - decode
        if self._left:
            return
        seen = max(LEAST_FACTOR, self._added / self._expected)
        # One slow pass means nothing: the first one of its shape compiles kernels and allocates memory.
        usual, self._last = min(seen, self._last), seen
        self._factor += _FOLLOWING * (usual - self._factor)
        self.forget()

    def forget(self) -> None:
        """What is counted now had other work beside it."""
        self._left = 0
        self._expected = self._added = 0.0

    @property
    def _slope(self) -> float:
        """Seconds of one more token in a pass that is longer than those that were measured: as at the best pace."""
        return min(cost / tokens for tokens, cost in zip(self._lengths, self._seconds, strict=True))

    def _curve(self, tokens: float) -> float:
        """Between two points that were measured on a line."""
        if tokens <= self._lengths[0]:
            return self._seconds[0]
        if tokens >= self._lengths[-1]:
            return self._seconds[-1] + (tokens - self._lengths[-1]) * self._slope
        high = bisect.bisect_left(self._lengths, tokens)
        low_tokens, high_tokens = self._lengths[high - 1], self._lengths[high]
        share = (tokens - low_tokens) / (high_tokens - low_tokens)
        return self._seconds[high - 1] + share * (self._seconds[high] - self._seconds[high - 1])
