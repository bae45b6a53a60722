"""Metrics of models of every kind, for Prometheus. A kind adds its own to the same registry."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from millstream.model_facts import ModelCard
from millstream.service.speculation_metrics import SpeculationMetrics

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
"""Histogram buckets for requests and their phases."""


class Metrics:
    """Has a registry of its own: two servers in one process, as in the tests, do not mix."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        label = ["model"]
        self.requests = Counter("millstream_requests", "Requests by outcome", [*label, "outcome"], registry=registry)
        self.rejected = Counter("millstream_rejected", "Requests rejected at once", [*label, "code"], registry=registry)
        self.duration = Histogram(
            "millstream_request_seconds", "Duration of requests", label, registry=registry, buckets=SECONDS
        )
        self._active = Gauge("millstream_active_requests", "Running requests", label, registry=registry)
        self._waiting = Gauge("millstream_waiting_requests", "Queued requests", label, registry=registry)
        self._kv_tokens = Gauge(
            "millstream_kv_tokens", "Tokens that running requests hold in the KV cache", label, registry=registry
        )
        self._memory = Gauge(
            "millstream_model_memory_bytes", "Memory of the model: weights and caches", label, registry=registry
        )
        self._cache = Gauge(
            "millstream_prefix_cache_bytes", "Size of the prefix cache", [*label, "tier"], registry=registry
        )
        self._ready = Gauge("millstream_model_ready", "1 if the model is loaded", label, registry=registry)
        self._failed = Gauge(
            "millstream_model_failed", "1 if the model has failed and is not retried", label, registry=registry
        )
        self._restarts = Gauge(
            "millstream_engine_restarts", "Restarts of the model's engine after crashes", label, registry=registry
        )
        self._speculation = SpeculationMetrics(registry)

    def watch(self, model: str, card: Callable[[], ModelCard]) -> None:
        """Gauges that are read when the metrics are scraped."""
        self._active.labels(model).set_function(lambda: card().active)
        self._waiting.labels(model).set_function(lambda: card().waiting)
        self._kv_tokens.labels(model).set_function(lambda: card().kv_tokens or 0)
        self._memory.labels(model).set_function(lambda: card().memory_bytes)
        self._cache.labels(model, "memory").set_function(lambda: card().prefix_cache_bytes)
        self._cache.labels(model, "disk").set_function(lambda: card().prefix_cache_disk_bytes)
        self._ready.labels(model).set_function(lambda: card().state == "ready")
        self._failed.labels(model).set_function(lambda: card().state == "failed")
        self._restarts.labels(model).set_function(lambda: card().restarts)
        self._speculation.watch(model, card)

    def unwatch(self, model: str) -> None:
        """The model is no longer served. Its counters stay: what was counted has happened. Those of its engine are gone
        with it."""
        self._speculation.unwatch(model)
        for gauge in [each for each in vars(self).values() if isinstance(each, Gauge)]:
            for sample in [sample for metric in gauge.collect() for sample in metric.samples]:
                if sample.labels.get("model") == model:
                    gauge.remove(*sample.labels.values())

    def render(self) -> tuple[bytes, str]:
        """The metrics page and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST
