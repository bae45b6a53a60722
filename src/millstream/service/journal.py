"""The request journal: what each request is doing now, and what the last ones did and how long each phase took.

Every kind of engine uses it the same way: open a record, note the moments as they come, end it. Who wants to know of
ended requests (the log, the history, traces) listens. All of it runs on the event loop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from millstream.errors import EngineBusy, MillstreamError, Overloaded
from millstream.request_context import RequestContext, current_request
from millstream.types import Usage

MAX_ENDED = 500
"""Ended requests that are kept. Running ones are bounded by admission and by the limit on connections."""

NAME_LENGTH, REASON_LENGTH = 200, 400
"""Characters of a model's name as a client wrote it, and of the reason of a failure."""

Outcome = Literal["done", "cancelled", "failed"]


class Phase(StrEnum):
    PREPARE = "prepare"
    """The model is loaded if need be, media are fetched, the prompt is rendered and tokenised."""
    QUEUE = "queue"
    """Submitted to the engine, but no step has worked on it."""
    PREFILL = "prefill"
    """From its first step to its first output."""
    DECODE = "decode"
    """From its first output to its end."""


_STATES = {Phase.PREPARE: "preparing", Phase.QUEUE: "queued", Phase.PREFILL: "prefill", Phase.DECODE: "decode"}
_PHASES = tuple(Phase)


def _outside() -> RequestContext:
    """For requests that came by no HTTP."""
    return RequestContext("-", "-", "-")


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """A phase of a request, in seconds since the request started. `end` is None while it lasts."""

    phase: Phase
    start: float
    end: float | None


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request was refused or failed, as plain data: an exception would keep all that the request held."""

    status: int
    code: str
    reason: str
    """One line that may be logged: see `MillstreamError.log_reason`."""
    is_fault: bool
    """True if the server or the model is at fault. A full queue is no fault."""

    @classmethod
    def of(cls, error: MillstreamError) -> Failure:
        is_fault = error.status >= 500 and not isinstance(error, EngineBusy | Overloaded)
        return cls(error.status, error.code, one_line(error.log_reason, REASON_LENGTH), is_fault)


def one_line(text: str, length: int) -> str:
    """A client's text for the log: shortened, without line breaks and the like."""
    text = text if len(text) <= length else f"{text[:length]}…"
    return text if text.isprintable() else "".join(char if char.isprintable() else " " for char in text)


class RequestRecord:
    """One request. Its phases follow each other without gaps; one that was skipped is not listed."""

    __slots__ = (
        "_begun",
        "accepted_tokens",
        "cached_tokens",
        "completion_tokens",
        "context",
        "drafted_tokens",
        "failure",
        "finish_reason",
        "first_output",
        "load_seconds",
        "media",
        "model",
        "operation",
        "outcome",
        "prompt_tokens",
        "requested",
        "served",
        "spans",
        "started",
        "total",
    )

    def __init__(self, model: str, operation: str, context: RequestContext) -> None:
        self.context = context
        self.operation = operation
        self.requested = self.model = one_line(model, NAME_LENGTH)
        """As the client named it, until the model is found."""
        self.served = False
        """True once the model is found: then `model` is its own name."""
        self.started = time.time()
        self.spans: list[tuple[Phase, float]] = [(Phase.PREPARE, 0.0)]
        """Each phase with its start."""
        self.load_seconds = 0.0
        """Of the time to prepare, how long it waited for the model to be loaded."""
        self.first_output: float | None = None
        self.total: float | None = None
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.completion_tokens = 0
        self.drafted_tokens = self.accepted_tokens = 0
        """Tokens of drafts that were verified, and how many of them were right."""
        self.media = 0
        """Images, audio clips and videos in its prompts."""
        self.finish_reason: str | None = None
        self.outcome: Outcome | None = None
        self.failure: Failure | None = None
        self._begun = time.monotonic()

    @property
    def request_id(self) -> str:
        return self.context.request_id

    @property
    def elapsed(self) -> float:
        """Seconds since it started; its duration once it has ended."""
        return time.monotonic() - self._begun if self.total is None else self.total

    @property
    def state(self) -> str:
        return _STATES[self.spans[-1][0]] if self.outcome is None else self.outcome

    @property
    def phases(self) -> list[PhaseSpan]:
        ends = [*(start for _, start in self.spans[1:]), self.total]
        return [PhaseSpan(phase, start, end) for (phase, start), end in zip(self.spans, ends, strict=True)]

    def seconds(self, phase: Phase) -> float:
        """How long a phase took, or takes until now; 0 if it was skipped."""
        total = 0.0
        for index, (each, start) in enumerate(self.spans):
            if each is phase:
                total += (self.spans[index + 1][1] if index + 1 < len(self.spans) else self.elapsed) - start
        return total

    def found(self, model: str) -> None:
        """The model is loaded, and this is its name. Called again if the request starts over: its engine went away
        before it took the request."""
        self.model, self.served = model, True
        del self.spans[1:]
        self.load_seconds = self.elapsed

    def enter(self, phase: Phase) -> None:
        """Does nothing if the request is in this phase or a later one: of several rows, the first one counts."""
        if self.outcome is None and _PHASES.index(phase) > _PHASES.index(self.spans[-1][0]):
            self.spans.append((phase, self.elapsed))


class Journal:
    """The running requests, and the last that have ended."""

    def __init__(self, *listeners: Callable[[RequestRecord], None], max_ended: int = MAX_ENDED) -> None:
        """`listeners` are called with each record that has ended. They must not block."""
        self._listeners = listeners
        self._running: dict[int, RequestRecord] = {}
        self._ended: deque[RequestRecord] = deque(maxlen=max_ended)

    def open(self, model: str, operation: str) -> RequestRecord:
        """Begin the record of a request for this model, in the context of the request. `operation` is a word of the
        semantic conventions of OpenTelemetry: `chat`, `text_completion`, `embeddings`."""
        record = RequestRecord(model, operation, current_request() or _outside())
        self._running[id(record)] = record
        return record

    def end(
        self,
        record: RequestRecord,
        outcome: Outcome,
        usage: Usage | None = None,
        *,
        finish_reason: str | None = None,
        error: MillstreamError | None = None,
    ) -> None:
        """Only the first call counts. `usage`: the final token counts, for kinds that count tokens."""
        if self._running.pop(id(record), None) is None:
            return
        record.total = record.elapsed
        record.outcome, record.finish_reason = outcome, finish_reason
        if usage is not None:
            record.prompt_tokens, record.completion_tokens = usage.prompt_tokens, usage.completion_tokens
            record.cached_tokens = usage.cached_tokens
            record.accepted_tokens = usage.accepted_prediction_tokens
            record.drafted_tokens = record.accepted_tokens + usage.rejected_prediction_tokens
        if error is not None:
            record.failure = Failure.of(error)
            record.context.reported = id(error)
        self._ended.append(record)
        for listener in self._listeners:
            listener(record)

    @property
    def running(self) -> Sequence[RequestRecord]:
        """Newest first."""
        return list(reversed(self._running.values()))

    def recent(self, limit: int) -> Sequence[RequestRecord]:
        """The last that have ended, newest first."""
        return [record for record, _ in zip(reversed(self._ended), range(limit), strict=False)]
