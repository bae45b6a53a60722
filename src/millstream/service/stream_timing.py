"""What the timers of streamed requests share, whatever the kind of model: how a request ends, in the journal and in the
metrics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from millstream.errors import EngineBusy, MillstreamError
from millstream.service.activity import Activities
from millstream.service.journal import Journal, Phase, RequestRecord
from millstream.service.metrics import Metrics
from millstream.types import Usage


class StreamTimers:
    """What all requests of a kind share."""

    def __init__(self, journal: Journal, metrics: Metrics, activities: Activities) -> None:
        self.journal = journal
        self.metrics = metrics
        self.activities = activities

    def refused(self, record: RequestRecord, error: MillstreamError) -> None:
        """A request was not accepted."""
        if record.served and isinstance(error, EngineBusy):
            self.metrics.rejected.labels(record.model, error.code).inc()
        elif record.served:
            self.metrics.requests.labels(record.model, "refused" if error.status < 500 else "failed").inc()
        self.journal.end(record, "failed", error=error)


class Timer(Protocol):
    @property
    def record(self) -> RequestRecord: ...


TimerT = TypeVar("TimerT", bound=Timer)


@contextmanager
def accepting(shared: StreamTimers, timer: TimerT) -> Iterator[TimerT]:
    """What the block raises ends the request of the timer. If it raises nothing, the request goes on."""
    try:
        yield timer
    except MillstreamError as error:
        shared.refused(timer.record, error)
        raise
    except Exception:
        shared.refused(timer.record, MillstreamError("The server failed on this request."))
        raise
    except BaseException:  # the client left
        shared.journal.end(timer.record, "cancelled", finish_reason="cancelled")
        raise


class StreamTimer:
    """Times one request. Only the first of its ends counts."""

    def __init__(self, shared: StreamTimers, record: RequestRecord) -> None:
        self.record = record
        self._shared = shared

    def found(self, model: str) -> None:
        """The model is loaded."""
        self.record.found(model)

    def started(self) -> None:
        """A step begins that works on it for the first time."""
        if self.record.outcome is None:
            self.record.enter(Phase.PREFILL)

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
