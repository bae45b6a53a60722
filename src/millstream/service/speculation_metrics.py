"""Prometheus metrics of speculative decoding: what engines have counted, read when the metrics are scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from millstream.model_facts import ModelCard


class SpeculationMetrics:
    """Engines count from their load on, so a counter starts again when its model is loaded again."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._cards: dict[str, Callable[[], ModelCard]] = {}
        registry.register(self)

    def watch(self, model: str, card: Callable[[], ModelCard]) -> None:
        self._cards[model] = card

    def unwatch(self, model: str) -> None:
        self._cards.pop(model, None)

    def collect(self) -> Iterator[Metric]:
        tokens = CounterMetricFamily(
            "millstream_draft_tokens", "Verified tokens of drafts, by outcome", labels=["model", "drafter", "outcome"]
        )
        passes = CounterMetricFamily("millstream_verifying_passes", "Passes that verified drafts", labels=["model"])
        gain = GaugeMetricFamily(
            "millstream_speculation_gain",
            "Tokens per second with speculative decoding over those without, in the latest verifying passes",
            labels=["model"],
        )
        for model, card in self._cards.items():
            if (done := card().speculation) is None:
                continue
            passes.add_metric([model], done.passes)
            gain.add_metric([model], done.gain)
            for drafts in done.drafts:
                tokens.add_metric([model, drafts.drafter, "accepted"], drafts.accepted)
                tokens.add_metric([model, drafts.drafter, "rejected"], drafts.proposed - drafts.accepted)
        yield from (tokens, passes, gain)
