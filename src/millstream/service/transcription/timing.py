"""Times each transcription: its record in the journal, its metrics and the model's activity."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import Counter

from millstream.errors import EngineBusy, MillstreamError
from millstream.service.activity import Activities
from millstream.service.journal import Journal, Phase, RequestRecord
from millstream.service.metrics import Metrics
from millstream.types import Usage


class TranscriptionTimers:
    """What all transcriptions share."""

    def __init__(self, journal: Journal, metrics: Metrics, activities: Activities) -> None:
        self.journal = journal
        self.metrics = metrics
        self.activities = activities
        self.transcribed = Counter(
            "millstream_transcribed_seconds",
            "Seconds of audio that were transcribed",
            ["model"],
            registry=metrics.registry,
        )

    @contextmanager
    def open(self, model: str) -> Iterator[TranscriptionTimer]:
        """The timer of a request. What the block raises ends the request; if it raises nothing, the request goes
        on."""
        timer = TranscriptionTimer(self, self.journal.open(model, "transcription"))
        try:
            yield timer
        except MillstreamError as error:
            timer.refused(error)
            raise
        except Exception:
            timer.refused(MillstreamError("The server failed on this request."))
            raise
        except BaseException:  # the client left
            self.journal.end(timer.record, "cancelled", finish_reason="cancelled")
            raise


class TranscriptionTimer:
    """Times one request. Only the first of its ends counts."""

    def __init__(self, shared: TranscriptionTimers, record: RequestRecord) -> None:
        self.record = record
        self._shared = shared

    def found(self, model: str) -> None:
        """The model is loaded."""
        self.record.found(model)
        self.record.media = 1

    def submitted(self) -> None:
        """The engine gets the first window now."""
        self.record.enter(Phase.QUEUE)

    def started(self) -> None:
        """A step begins that works on its first window."""
        if self.record.outcome is None:
            self.record.enter(Phase.PREFILL)

    def heard(self, seconds: float, prompt_tokens: int, completion_tokens: int) -> None:
        """The text of a window of so many seconds has come from the engine."""
        record, shared = self.record, self._shared
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

    def refused(self, error: MillstreamError) -> None:
        """The request was not accepted."""
        record, metrics = self.record, self._shared.metrics
        if record.served and isinstance(error, EngineBusy):
            metrics.rejected.labels(record.model, error.code).inc()
        elif record.served:
            metrics.requests.labels(record.model, "refused" if error.status < 500 else "failed").inc()
        self._shared.journal.end(record, "failed", error=error)

    def ended(self, outcome: str, usage: Usage, error: MillstreamError | None = None) -> None:
        """`outcome`: finished, cancelled or failed."""
        record, shared = self.record, self._shared
        if record.outcome is not None:
            return
        if outcome == "finished":
            shared.journal.end(record, "done", usage)
            shared.metrics.duration.labels(record.model).observe(record.elapsed)
        elif error is not None:
            shared.journal.end(record, "failed", usage, error=error)
        else:
            shared.journal.end(record, "cancelled", usage, finish_reason="cancelled")
        shared.metrics.requests.labels(record.model, outcome).inc()
