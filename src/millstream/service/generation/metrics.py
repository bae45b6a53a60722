"""Prometheus metrics of text generation: tokens and latencies."""

from __future__ import annotations

from functools import lru_cache

from prometheus_client import Counter

from millstream.service.histogram import PlainHistogram
from millstream.service.metrics import SECONDS, Metrics

_GAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class GenerationMetrics:
    """Registered in the registry of `common`."""

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
        self.prepare = PlainHistogram(
            "millstream_prepare_seconds",
            "Time to render and tokenise prompts, media included",
            buckets=SECONDS,
            registry=registry,
        )
        self.queue = PlainHistogram(
            "millstream_queue_seconds",
            "Time from the submission to the first step that works on the request",
            buckets=SECONDS,
            registry=registry,
        )
        self.prefill = PlainHistogram(
            "millstream_prefill_seconds",
            "Time from the first step of a request to its first token",
            buckets=SECONDS,
            registry=registry,
        )
        self.first_token = PlainHistogram(
            "millstream_time_to_first_token_seconds",
            "Time from the request to its first output",
            buckets=SECONDS,
            registry=registry,
        )
        self.gap = PlainHistogram(
            "millstream_delta_gap_seconds",
            "Time between two deltas of a request",
            buckets=_GAP_BUCKETS,
            registry=registry,
        )
        self._models: dict[str, ModelMetrics] = {}

    def of(self, model: str) -> ModelMetrics:
        """Those of one model: to look each of them up for each request takes longer than to count."""
        if model not in self._models:
            self._models[model] = ModelMetrics(self, model)
        return self._models[model]


class ModelMetrics:
    """What is counted of each request to one model."""

    def __init__(self, metrics: GenerationMetrics, model: str) -> None:
        self.prompt_tokens = metrics.prompt_tokens.labels(model)
        self.cached_tokens = metrics.cached_tokens.labels(model)
        self.generated_tokens = metrics.generated_tokens.labels(model)
        self.hit, self.miss = metrics.hits.labels(model, "hit"), metrics.hits.labels(model, "miss")
        self.prepare, self.queue = metrics.prepare.labels(model), metrics.queue.labels(model)
        self.prefill, self.first_token = metrics.prefill.labels(model), metrics.first_token.labels(model)
        self.duration = metrics.common.duration.labels(model)
        self.ended = lru_cache(32)(lambda outcome: metrics.common.requests.labels(model, outcome))
        """The counter of requests with an outcome, of which there are few."""
