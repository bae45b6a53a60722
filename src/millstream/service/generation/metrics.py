"""Metrics of generation: tokens, latencies, and the line in the log that each request leaves."""

from __future__ import annotations

import logging
import time

from prometheus_client import Counter, Histogram

from millstream.service.metrics import SECONDS, Metrics
from millstream.types import Usage

log = logging.getLogger(__name__)

_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class GenerationMetrics:
    """In the registry of `common`."""

    def __init__(self, common: Metrics) -> None:
        self.common = common
        registry, label = common.registry, ["model"]
        self.prompt_tokens = Counter("millstream_prompt_tokens", "Prompt tokens", label, registry=registry)
        self.cached_tokens = Counter(
            "millstream_cached_prompt_tokens", "Prompt tokens found in the prefix cache", label, registry=registry
        )
        self.generated_tokens = Counter("millstream_generated_tokens", "Generated tokens", label, registry=registry)
        self.hits = Counter(
            "millstream_prefix_cache_requests",
            "Requests by prefix cache hit or miss",
            [*label, "outcome"],
            registry=registry,
        )
        self.prepare = Histogram(
            "millstream_prepare_seconds",
            "Time to render and tokenise prompts, media included",
            label,
            registry=registry,
            buckets=SECONDS,
        )
        self.first_token = Histogram(
            "millstream_time_to_first_token_seconds",
            "Time from the request to its first output",
            label,
            registry=registry,
            buckets=SECONDS,
        )
        self.gap = Histogram(
            "millstream_delta_gap_seconds", "Time between two deliveries", label, registry=registry, buckets=_GAPS
        )


class RequestTimer:
    """Times one request. `ended` counts once, however often it is called."""

    def __init__(self, metrics: GenerationMetrics, model: str) -> None:
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
        self._metrics.common.requests.labels(self._model, outcome).inc()
        self._metrics.prompt_tokens.labels(self._model).inc(usage.prompt_tokens)
        self._metrics.cached_tokens.labels(self._model).inc(usage.cached_tokens)
        self._metrics.hits.labels(self._model, "hit" if usage.cached_tokens else "miss").inc()
        self._metrics.generated_tokens.labels(self._model).inc(usage.completion_tokens)
        self._metrics.common.duration.labels(self._model).observe(seconds)
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
