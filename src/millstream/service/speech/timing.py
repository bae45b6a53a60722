"""Times each request to a speech model: its record in the journal, its metrics and the model's activity."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import Counter, Histogram

from millstream.errors import EngineBusy, MillstreamError
from millstream.service.activity import Activities
from millstream.service.journal import Journal, Phase, RequestRecord
from millstream.service.metrics import SECONDS, Metrics
from millstream.types import Usage


class SpeechTimers:
    """What all requests to speech models share."""

    def __init__(self, journal: Journal, metrics: Metrics, activities: Activities) -> None:
        self.journal = journal
        self.metrics = metrics
        self.activities = activities
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

    @contextmanager
    def open(self, model: str) -> Iterator[SpeechTimer]:
        """The timer of a request. What the block raises ends the request; if it raises nothing, the request goes
        on."""
        timer = SpeechTimer(self, self.journal.open(model, "speech"))
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


class SpeechTimer:
    """Times one request. Only the first of its ends counts."""

    def __init__(self, shared: SpeechTimers, record: RequestRecord) -> None:
        self.record = record
        self._shared = shared

    def found(self, model: str) -> None:
        """The model is loaded."""
        self.record.found(model)

    def submitted(self, tokens: int) -> None:
        """The engine gets the text now."""
        self.record.prompt_tokens = tokens
        self.record.enter(Phase.QUEUE)

    def started(self) -> None:
        """A step begins that speaks its first piece."""
        if self.record.outcome is None:
            self.record.enter(Phase.PREFILL)

    def delivered(self, seconds: float) -> None:
        """So much sound goes to the client now."""
        record = self.record
        self._shared.spoken.labels(record.model).inc(seconds)
        if record.first_output is None:
            record.first_output = record.elapsed
            record.enter(Phase.DECODE)
            self._shared.first_sound.labels(record.model).observe(record.elapsed)
            self._shared.activities.of(record.model).first_token.add(record.elapsed)

    def refused(self, error: MillstreamError) -> None:
        """The request was not accepted."""
        record, metrics = self.record, self._shared.metrics
        if record.served and isinstance(error, EngineBusy):
            metrics.rejected.labels(record.model, error.code).inc()
        elif record.served:
            metrics.requests.labels(record.model, "refused" if error.status < 500 else "failed").inc()
        self._shared.journal.end(record, "failed", error=error)

    def ended(self, outcome: str, tokens: int, error: MillstreamError | None = None) -> None:
        """`outcome`: finished, cancelled or failed. `tokens`: of all that was prepared."""
        record, shared = self.record, self._shared
        if record.outcome is not None:
            return
        record.prompt_tokens = tokens
        usage = Usage(prompt_tokens=tokens)
        if outcome == "finished":
            shared.journal.end(record, "done", usage)
            shared.activities.of(record.model).prompt_tokens += tokens
            shared.metrics.duration.labels(record.model).observe(record.elapsed)
        elif error is not None:
            shared.journal.end(record, "failed", error=error)
        else:
            shared.journal.end(record, "cancelled", usage, finish_reason="cancelled")
        shared.metrics.requests.labels(record.model, outcome).inc()
