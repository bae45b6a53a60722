"""The last hour of each model in samples of a few seconds, from counters of the event loop: no engine is asked."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter

from millstream.model_facts import ModelCard
from millstream.service.activity import Activities, Activity
from millstream.service.journal import RequestRecord
from millstream.service.ports import HistoryView

INTERVAL = 5.0
SAMPLES = 720
"""One hour."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One interval of one model. None where nothing was measured."""

    generated_tokens_per_second: float | None = None
    prompt_tokens_per_second: float | None = None
    active: int | None = None
    waiting: int | None = None
    first_token_p50: float | None = None
    first_token_p99: float | None = None
    gap_p50: float | None = None
    gap_p99: float | None = None
    memory_bytes: int | None = None
    kv_tokens: int | None = None
    prefix_cache_bytes: int | None = None
    cached_share: float | None = None
    requests: int | None = None
    failures: int | None = None


SERIES = tuple(field.name for field in fields(Sample))
_VALUES = attrgetter(*SERIES)
_UNKNOWN = Sample()


class History:
    """Samples all models at the same moments. A model that was not there yet has unknown values."""

    def __init__(
        self,
        cards: Callable[[], Sequence[ModelCard]],
        activities: Activities,
        *,
        interval: float = INTERVAL,
        samples: int = SAMPLES,
    ) -> None:
        self._cards = cards
        self._activities = activities
        self._interval = interval
        self._ticks: deque[tuple[float, dict[str, Sample]]] = deque(maxlen=samples)
        self._last = time.monotonic()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._run())

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def ended(self, record: RequestRecord) -> None:
        """Listens to the journal. A name that no model has is not counted: anyone could make up such names."""
        if record.served:
            activity = self._activities.of(record.model)
            activity.requests += 1
            activity.failures += record.failure is not None and record.failure.is_fault

    def sample(self, now: float, seconds: float) -> None:
        """End an interval that lasted `seconds`. `now`: in seconds since 1970."""
        activities = self._activities.take()
        samples = {card.name: _sample(card, activities.get(card.name, Activity()), seconds) for card in self._cards()}
        self._ticks.append((now, samples))

    def view(self, since: float) -> HistoryView:
        """The samples after `since`, in seconds since 1970."""
        ticks = [tick for tick in self._ticks if tick[0] > since]
        names = dict.fromkeys(name for _, samples in ticks for name in samples)
        models = {name: _columns([samples.get(name, _UNKNOWN) for _, samples in ticks]) for name in names}
        return HistoryView(self._interval, time.time(), [now for now, _ in ticks], models)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            before, self._last = self._last, time.monotonic()
            self.sample(time.time(), self._last - before)


def _columns(samples: Sequence[Sample]) -> dict[str, list[float | None]]:
    return dict(zip(SERIES, map(list, zip(*map(_VALUES, samples), strict=True)), strict=True))


def _sample(card: ModelCard, activity: Activity, seconds: float) -> Sample:
    return Sample(
        generated_tokens_per_second=activity.generated_tokens / seconds,
        prompt_tokens_per_second=activity.prompt_tokens / seconds,
        active=card.active,
        waiting=card.waiting,
        first_token_p50=activity.first_token.quantile(0.5),
        first_token_p99=activity.first_token.quantile(0.99),
        gap_p50=activity.gap.quantile(0.5),
        gap_p99=activity.gap.quantile(0.99),
        memory_bytes=card.memory_bytes,
        kv_tokens=card.kv_tokens,
        prefix_cache_bytes=card.prefix_cache_bytes,
        cached_share=activity.cached_tokens / activity.prompt_tokens if activity.prompt_tokens else None,
        requests=activity.requests,
        failures=activity.failures,
    )
