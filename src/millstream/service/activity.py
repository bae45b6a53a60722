"""Counts what a model does, as plain numbers on the event loop: cheap enough for every token."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field, replace
from itertools import accumulate

_LEAST, _RATIO, _BUCKETS = 1e-5, 1.1, 200
_BOUNDS = tuple(_LEAST * _RATIO**power for power in range(_BUCKETS))
"""The upper ends of the buckets of `Durations`: 10 microseconds to half an hour."""


class Durations:
    """Quantiles of many durations in little memory: they are counted in buckets 10 % wide, so a quantile is off by 5 %
    at most."""

    __slots__ = ("_counts", "count")

    def __init__(self) -> None:
        self.count = 0
        self._counts = [0] * (_BUCKETS + 1)

    def add(self, seconds: float) -> None:
        self.count += 1
        self._counts[bisect_left(_BOUNDS, seconds)] += 1

    def quantile(self, share: float) -> float | None:
        """None if nothing was counted."""
        if not self.count:
            return None
        bucket = bisect_left(list(accumulate(self._counts)), share * self.count)
        return _BOUNDS[min(bucket, _BUCKETS - 1)] / math.sqrt(_RATIO)


@dataclass(slots=True)
class Activity:
    """What one model did in the current interval of the history."""

    generated_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt tokens, those from the prefix cache."""
    requests: int = 0
    """Requests that have ended."""
    failures: int = 0
    """Of these, those that the server or the model failed."""
    first_token: Durations = field(default_factory=Durations)
    gap: Durations = field(default_factory=Durations)
    """Between two deltas of a request."""

    def take(self) -> Activity:
        """What was counted so far. It counts from 0 again."""
        taken = replace(self)
        self.generated_tokens = self.prompt_tokens = self.cached_tokens = self.requests = self.failures = 0
        self.first_token, self.gap = Durations(), Durations()
        return taken


class Activities:
    """The activity of each model."""

    def __init__(self) -> None:
        self._models: dict[str, Activity] = {}

    def of(self, model: str) -> Activity:
        """The same object each time, so that a request asks once."""
        if (found := self._models.get(model)) is None:
            found = self._models[model] = Activity()
        return found

    def take(self) -> dict[str, Activity]:
        """Ends an interval."""
        return {name: activity.take() for name, activity in self._models.items()}
