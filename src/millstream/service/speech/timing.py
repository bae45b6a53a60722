"""Times each request to a speech model: its record in the journal, its metrics and the model's activity."""

from __future__ import annotations

from contextlib import AbstractContextManager

from prometheus_client import Counter, Histogram

from millstream.errors import MillstreamError
from millstream.service.activity import Activities
from millstream.service.journal import Journal, Phase, RequestRecord
from millstream.service.metrics import SECONDS, Metrics
from millstream.service.stream_timing import StreamTimer, StreamTimers, accepting
from millstream.types import Usage


class SpeechTimers(StreamTimers):
    def __init__(self, journal: Journal, metrics: Metrics, activities: Activities) -> None:
        super().__init__(journal, metrics, activities)
        registry = metrics.registry
        self.spoken = Counter(
            "millstream_spoken_seconds", "Seconds of speech that were made", ["model"], registry=registry
        )
        self.first_sound = Histogram(
            "millstream_first_sound_seconds",
            "Time from a request to its first sound",
            ["model"],
            registry=registry,
            buckets=SECONDS,
        )

    def open(self, model: str) -> AbstractContextManager[SpeechTimer]:
        return accepting(self, SpeechTimer(self, self.journal.open(model, "speech")))


class SpeechTimer(StreamTimer):
    def __init__(self, shared: SpeechTimers, record: RequestRecord) -> None:
        super().__init__(shared, record)
        self._timers = shared

    def submitted(self, tokens: int) -> None:
        """The engine gets the text now."""
        self.record.prompt_tokens = tokens
        self.record.enter(Phase.QUEUE)

    def delivered(self, seconds: float) -> None:
        """So much sound goes to the client now."""
        record = self.record
        self._timers.spoken.labels(record.model).inc(seconds)
        if record.first_output is None:
            record.first_output = record.elapsed
            record.enter(Phase.DECODE)
            self._timers.first_sound.labels(record.model).observe(record.elapsed)
            self._shared.activities.of(record.model).first_token.add(record.elapsed)

    def ended(self, outcome: str, usage: Usage, error: MillstreamError | None = None) -> None:
        """`usage`: of all that was prepared."""
        if self.record.outcome is None:
            self.record.prompt_tokens = usage.prompt_tokens
            if outcome == "finished":
                self._shared.activities.of(self.record.model).prompt_tokens += usage.prompt_tokens
        super().ended(outcome, usage, error)
