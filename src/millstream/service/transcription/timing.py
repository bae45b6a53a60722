"""Times each transcription: its record in the journal, its metrics and the model's activity."""

from __future__ import annotations

from contextlib import AbstractContextManager

from prometheus_client import Counter

from millstream.service.activity import Activities
from millstream.service.journal import Journal, Phase, RequestRecord
from millstream.service.metrics import Metrics
from millstream.service.stream_timing import StreamTimer, StreamTimers, accepting


class TranscriptionTimers(StreamTimers):
    def __init__(self, journal: Journal, metrics: Metrics, activities: Activities) -> None:
        super().__init__(journal, metrics, activities)
        self.transcribed = Counter(
            "millstream_transcribed_seconds",
            "Seconds of audio that were transcribed",
            ["model"],
            registry=metrics.registry,
        )

    def open(self, model: str) -> AbstractContextManager[TranscriptionTimer]:
        return accepting(self, TranscriptionTimer(self, self.journal.open(model, "transcription")))


class TranscriptionTimer(StreamTimer):
    def __init__(self, shared: TranscriptionTimers, record: RequestRecord) -> None:
        super().__init__(shared, record)
        self._timers = shared

    def found(self, model: str) -> None:
        super().found(model)
        self.record.media = 1

    def submitted(self) -> None:
        """The engine gets the first window now."""
        self.record.enter(Phase.QUEUE)

    def heard(self, seconds: float, prompt_tokens: int, completion_tokens: int) -> None:
        """The text of a window of so many seconds has come from the engine."""
        record, shared = self.record, self._timers
        record.enter(Phase.DECODE)
        record.completion_tokens += completion_tokens
        shared.transcribed.labels(record.model).inc(seconds)
        activity = shared.activities.of(record.model)
        activity.prompt_tokens += prompt_tokens
        activity.generated_tokens += completion_tokens

    def delivered(self) -> None:
        """A segment goes to the client now."""
        record = self.record
        if record.first_output is None:
            record.first_output = record.elapsed
            self._shared.activities.of(record.model).first_token.add(record.elapsed)
