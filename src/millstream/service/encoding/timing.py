"""Times each request to an encoder: its record in the journal, its metrics and the model's activity."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import Counter

from millstream.engine.messages import Started
from millstream.errors import EngineBusy, MillstreamError
from millstream.service.activity import Activities
from millstream.service.journal import Journal, Phase, RequestRecord
from millstream.service.metrics import Metrics
from millstream.types import Usage


class EncodingTimers:
    """What all requests to encoders share."""

    def __init__(self, journal: Journal, metrics: Metrics, activities: Activities) -> None:
        self._journal = journal
        self._metrics = metrics
        self._activities = activities
        self._tokens = Counter(
            "millstream_encoded_tokens",
            "Tokens of texts that were embedded or scored",
            ["model"],
            registry=metrics.registry,
        )

    @contextmanager
    def open(self, model: str, operation: str) -> Iterator[RequestTimer]:
        """Times a request from its begin to its end, however it ends."""
        record = self._journal.open(model, operation)
        timer = RequestTimer(record)
        try:
            yield timer
        except MillstreamError as error:
            self._failed(record, error)
            raise
        except Exception:
            self._failed(record, MillstreamError("The server failed on this request."))
            raise
        except BaseException:  # the client left
            self._journal.end(record, "cancelled", finish_reason="cancelled")
            if record.served:
                self._metrics.requests.labels(record.model, "cancelled").inc()
            raise
        self._journal.end(record, "done", Usage(prompt_tokens=timer.tokens))
        self._tokens.labels(record.model).inc(timer.tokens)
        self._metrics.requests.labels(record.model, "finished").inc()
        self._metrics.duration.labels(record.model).observe(record.elapsed)
        self._activities.of(record.model).prompt_tokens += timer.tokens

    def _failed(self, record: RequestRecord, error: MillstreamError) -> None:
        if record.served and isinstance(error, EngineBusy):
            self._metrics.rejected.labels(record.model, error.code).inc()
        elif record.served:
            self._metrics.requests.labels(record.model, "refused" if error.status < 500 else "failed").inc()
        self._journal.end(record, "failed", error=error)


class RequestTimer:
    def __init__(self, record: RequestRecord) -> None:
        self._record = record
        self.tokens = 0

    def found(self, model: str) -> None:
        """The model is loaded."""
        self._record.found(model)

    def submitted(self, tokens: int) -> None:
        """The engine gets the inputs now."""
        self.tokens = self._record.prompt_tokens = tokens
        self._record.enter(Phase.QUEUE)

    def started(self, event: Started) -> None:
        """A batch begins that has some of its inputs."""
        self._record.enter(Phase.PREFILL)
