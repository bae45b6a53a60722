"""Measures the parts of a request, and keeps its model loaded for as long as the request says."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence

from millstream.service.ports import DeltaSink, Generation, Services
from millstream.types import Delta, GenerationRequest, Sampling, Usage


class Stopwatch:
    """Starts when it is made. All durations are in nanoseconds."""

    def __init__(self) -> None:
        self._begun = self._submitted = time.perf_counter_ns()
        self._first: int | None = None

    def submitted(self) -> None:
        """The model is loaded, the prompt is prepared, and the engine has both."""
        self._submitted = time.perf_counter_ns()

    def output(self) -> None:
        """Some output has arrived."""
        if self._first is None:
            self._first = time.perf_counter_ns()

    def load_fields(self) -> dict[str, int]:
        """The figures of a request that only loads a model."""
        elapsed = time.perf_counter_ns() - self._begun
        return {"total_duration": elapsed, "load_duration": elapsed}

    def fields(self, usage: Usage) -> dict[str, int]:
        """The figures of the last line. Prefill ends with the first output; waiting for other requests counts to it."""
        now = time.perf_counter_ns()
        first = now if self._first is None else self._first
        return {
            "total_duration": now - self._begun,
            "load_duration": self._submitted - self._begun,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": first - self._submitted,
            "eval_count": usage.completion_tokens,
            "eval_duration": now - first,
        }


class _TimedSink:
    def __init__(self, inner: DeltaSink, watch: Stopwatch) -> None:
        self.ready = inner.ready
        self._inner = inner
        self._watch = watch

    def deliver(self, deltas: Sequence[Delta]) -> None:
        self._watch.output()
        self._inner.deliver(deltas)


class _TimedGeneration:
    """A generation that tells the stopwatch about its output."""

    def __init__(self, inner: Generation, watch: Stopwatch) -> None:
        self._inner = inner
        self._watch = watch

    @property
    def model(self) -> str:
        return self._inner.model

    @property
    def sampling(self) -> Sampling:
        return self._inner.sampling

    @property
    def usage(self) -> Usage:
        return self._inner.usage

    async def __aiter__(self) -> AsyncIterator[Sequence[Delta]]:
        async for batch in self._inner:
            self._watch.output()
            yield batch

    def deliver_to(self, sink: DeltaSink) -> None:
        self._inner.deliver_to(_TimedSink(sink, self._watch))

    def cancel(self, outcome: str = "cancelled") -> None:
        self._inner.cancel(outcome)


class TimedService:
    """The generation service, for one request. `keep_alive`: idle seconds after which the model is unloaded."""

    def __init__(self, services: Services, watch: Stopwatch, keep_alive: float | None) -> None:
        self._services = services
        self._watch = watch
        self._keep_alive = keep_alive

    async def start(self, request: GenerationRequest) -> Generation:
        generation = await self._services.generation.start(request)
        self._watch.submitted()
        if self._keep_alive is not None:  # not before: a model that is in use is not unloaded
            self._services.models.keep_loaded(generation.model, self._keep_alive)
        return _TimedGeneration(generation, self._watch)

    async def count_tokens(self, request: GenerationRequest) -> int:
        return await self._services.generation.count_tokens(request)
