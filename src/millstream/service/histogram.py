"""A Prometheus histogram that is cheap to observe: plain numbers on the event loop, summed up when it is scraped.

The client library's own takes a lock for each bucket and each sum, which at one observation per token costs more than
the token's text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString


class Observations:
    """What was observed of one model."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value


class PlainHistogram:
    """Observed on the event loop alone, and scraped there."""

    def __init__(self, name: str, documentation: str, *, buckets: Sequence[float], registry: CollectorRegistry) -> None:
        self._name = name
        self._documentation = documentation
        self._bounds = tuple(buckets)
        self._models: dict[str, Observations] = {}
        registry.register(self)

    def labels(self, model: str) -> Observations:
        """The same object each time, so that a request asks once."""
        if (found := self._models.get(model)) is None:
            found = self._models[model] = Observations(self._bounds)
        return found

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=["model"])
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        for model, seen in self._models.items():
            family.add_metric([model], list(zip(names, accumulate(seen.counts), strict=True)), seen.total)
        yield family
