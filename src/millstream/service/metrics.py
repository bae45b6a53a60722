"""What the server counts, for Prometheus and for the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from millstream.types import ModelCard, Usage

log = logging.getLogger(__name__)

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """A registry of its own: two servers in one process, as in the tests, do not mix."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        label = ["model"]
        self.requests = Counter(
            "millstream_requests", "Requests by how they ended", [*label, "outcome"], registry=registry
        )
        self.rejected = Counter("millstream_rejected", "Requests refused at once", [*label, "code"], registry=registry)
        self.prompt_tokens = Counter("millstream_prompt_tokens", "Prompt tokens read", label, registry=registry)
        self.cached_tokens = Counter(
            "millstream_cached_prompt_tokens", "Prompt tokens that were not computed again", label, registry=registry
        )
        self.generated_tokens = Counter("millstream_generated_tokens", "Tokens written", label, registry=registry)
        self.active = Gauge("millstream_active_requests", "Requests that hold a row", label, registry=registry)
        self.waiting = Gauge("millstream_waiting_requests", "Requests in the queue", label, registry=registry)
        self.memory = Gauge("millstream_model_memory_bytes", "Weights, keys and values", label, registry=registry)
        self.kept = Gauge(
            "millstream_prefix_cache_bytes", "Beginnings of prompts that are kept", [*label, "tier"], registry=registry
        )
        self.hits = Counter(
            "millstream_prefix_cache_requests",
            "Requests by what was kept of their prompts",
            [*label, "outcome"],
            registry=registry,
        )
        self.ready = Gauge("millstream_model_ready", "1 where the model is loaded", label, registry=registry)
        self.failed = Gauge(
            "millstream_model_failed", "1 where the model has failed and is not tried again", label, registry=registry
        )
        self.restarts = Gauge(
            "millstream_engine_restarts", "How often its engine was started again", label, registry=registry
        )
        self.prepare = Histogram(
            "millstream_prepare_seconds", "Template and tokenising", label, registry=registry, buckets=_SECONDS
        )
        self.first_token = Histogram(
            "millstream_time_to_first_token_seconds",
            "From the request to its first text",
            label,
            registry=registry,
            buckets=_SECONDS,
        )
        self.gap = Histogram(
            "millstream_delta_gap_seconds", "Between two deliveries", label, registry=registry, buckets=_GAPS
        )
        self.duration = Histogram(
            "millstream_request_seconds", "Whole requests", label, registry=registry, buckets=_SECONDS
        )

    def watch(self, model: str, card: Callable[[], ModelCard]) -> None:
        """Gauges that are read when the page is asked for."""
        self.active.labels(model).set_function(lambda: card().active)
        self.waiting.labels(model).set_function(lambda: card().waiting)
        self.memory.labels(model).set_function(lambda: card().memory_bytes)
        self.kept.labels(model, "memory").set_function(lambda: card().prefix_cache_bytes)
        self.kept.labels(model, "disk").set_function(lambda: card().prefix_cache_disk_bytes)
        self.ready.labels(model).set_function(lambda: card().state == "ready")
        self.failed.labels(model).set_function(lambda: card().state == "failed")
        self.restarts.labels(model).set_function(lambda: card().restarts)

    def render(self) -> tuple[bytes, str]:
        return generate_latest(self._registry), CONTENT_TYPE_LATEST


class RequestTimer:
    """The clock of one request. `ended` counts once, however often it is told."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics = metrics
        self._model = model
        self._started = self._last = time.monotonic()
        self._first: float | None = None
        self._over = False
        self._gap = metrics.gap.labels(model)

    def prepared(self, tokens: int, images: int) -> None:
        seconds = time.monotonic() - self._started
        self._metrics.prepare.labels(self._model).observe(seconds)
        if seconds > 1:
            log.warning(
                "%s: preparing a prompt of %d tokens and %d media took %.1f s", self._model, tokens, images, seconds
            )

    def delivered(self) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = now - self._started
            self._metrics.first_token.labels(self._model).observe(self._first)
        else:
            self._gap.observe(now - self._last)
        self._last = now

    def ended(self, outcome: str, usage: Usage) -> None:
        if self._over:
            return
        self._over = True
        seconds = time.monotonic() - self._started
        self._metrics.requests.labels(self._model, outcome).inc()
        self._metrics.prompt_tokens.labels(self._model).inc(usage.prompt_tokens)
        self._metrics.cached_tokens.labels(self._model).inc(usage.cached_tokens)
        self._metrics.hits.labels(self._model, "hit" if usage.cached_tokens else "miss").inc()
        self._metrics.generated_tokens.labels(self._model).inc(usage.completion_tokens)
        self._metrics.duration.labels(self._model).observe(seconds)
        first = "none" if self._first is None else f"{self._first * 1000:.0f} ms"
        log.info(
            "%s: %s, %d prompt + %d tokens in %.2f s, first after %s",
            self._model,
            outcome,
            usage.prompt_tokens,
            usage.completion_tokens,
            seconds,
            first,
        )
