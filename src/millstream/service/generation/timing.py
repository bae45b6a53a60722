"""Times each generation request: fills in its record in the journal, its metrics and the model's activity."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from millstream.errors import EngineBusy, MillstreamError
from millstream.service.activity import Activities
from millstream.service.generation.content_log import Answer, log_prompts
from millstream.service.generation.metrics import GenerationMetrics
from millstream.service.journal import Journal, Outcome, Phase, RequestRecord
from millstream.types import ChatPrompt, Delta, GenerationRequest, Usage

_OUTCOMES: dict[str, Outcome] = {"finished": "done", "failed": "failed"}
"""From a metric's label to the journal's word; all others are ways to be cancelled."""


class RequestTimers:
    """What all timers share."""

    def __init__(
        self, journal: Journal, metrics: GenerationMetrics, activities: Activities, *, log_content: bool = False
    ) -> None:
        """`log_content`: write prompts and answers to the log."""
        self.log_content = log_content
        self.journal = journal
        self.metrics = metrics
        self.activities = activities

    def open(self, request: GenerationRequest) -> RequestTimer:
        """The timer of a request, to be entered while it is prepared and submitted."""
        operation = "chat" if isinstance(request.prompts[0], ChatPrompt) else "text_completion"
        timer = RequestTimer(self, self.journal.open(request.model, operation))
        if self.log_content:
            log_prompts(timer.record.request_id, request.prompts)
        return timer


class RequestTimer:
    """Times one request. Only the first call of `ended` counts. What its block raises ends the request; if it raises
    nothing, the request goes on."""

    def __init__(self, shared: RequestTimers, record: RequestRecord) -> None:
        self.record = record
        self._shared = shared
        self._metrics = shared.metrics
        self._last = 0.0
        self._prompt_tokens = 0
        self._has_generated = self.has_ended = False
        self._first_output = True
        self._answer = Answer() if shared.log_content else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        if isinstance(error, MillstreamError):
            self.refused(error)
        elif isinstance(error, Exception):
            self.refused(MillstreamError("The server failed on this request."))
        else:  # the client left
            self._shared.journal.end(self.record, "cancelled", finish_reason="cancelled")

    def found(self, model: str) -> None:
        """The model is loaded."""
        self.record.found(model)
        self._gap = self._metrics.gap.labels(model)
        self._activity = self._shared.activities.of(model)

    def submitted(self, prompt_tokens: int, media: int) -> None:
        """The prompts are prepared, and the engine gets them now."""
        record = self.record
        self._prompt_tokens = record.prompt_tokens = prompt_tokens
        record.media = media
        self._metrics.of(record.model).prepare.observe(record.elapsed - record.load_seconds)
        record.enter(Phase.QUEUE)

    def started(self, cached_tokens: int) -> None:
        """A step begins that works on one of its rows. `cached_tokens`: of all its prompts, as far as is known."""
        record = self.record
        if record.outcome is not None:
            return
        record.enter(Phase.PREFILL)
        record.cached_tokens = cached_tokens

    def generated(self, tokens: int) -> None:
        """Tokens have come from the engine."""
        record = self.record
        if not self._has_generated:
            self._prefilled()
            record.enter(Phase.DECODE)
        record.completion_tokens += tokens
        self._activity.generated_tokens += tokens

    def delivered(self, deltas: Sequence[Delta]) -> None:
        """Output goes to the client now."""
        if self._answer is not None:
            self._answer.add(deltas)
        now = self.record.elapsed
        if self._first_output:
            self._first_output = False
            self.record.first_output = now
            self._metrics.of(self.record.model).first_token.observe(now)
            self._activity.first_token.add(now)
        else:
            gap = now - self._last
            self._gap.observe(gap)
            self._activity.gap.add(gap)
        self._last = now

    def refused(self, error: MillstreamError) -> None:
        """The request was not accepted."""
        if self.record.served:
            requests, rejected = self._metrics.common.requests, self._metrics.common.rejected
            if isinstance(error, EngineBusy):
                rejected.labels(self.record.model, error.code).inc()
            else:
                requests.labels(self.record.model, "refused" if error.status < 500 else "failed").inc()
        self._shared.journal.end(self.record, "failed", error=error)

    def ended(
        self, outcome: str, usage: Usage, finish_reason: str | None = None, error: MillstreamError | None = None
    ) -> None:
        """`outcome`: its label in metrics."""
        if self.has_ended:
            return
        self.has_ended = True
        if outcome == "finished" and not self._has_generated:
            self._prefilled()
        word = _OUTCOMES.get(outcome, "cancelled")
        reason = outcome if word == "cancelled" else finish_reason
        self._shared.journal.end(self.record, word, usage, finish_reason=reason, error=error)
        self._observe(outcome, usage)
        if self._answer is not None:
            self._answer.log(self.record.request_id)

    def _prefilled(self) -> None:
        """The prompts are computed: from now on they count."""
        self._has_generated = True
        self._activity.prompt_tokens += self._prompt_tokens
        self._activity.cached_tokens += self.record.cached_tokens or 0

    def _observe(self, outcome: str, usage: Usage) -> None:
        record = self.record
        metrics, elapsed = self._metrics.of(record.model), record.elapsed
        metrics.ended(outcome).inc()
        metrics.prompt_tokens.inc(usage.prompt_tokens)
        metrics.cached_tokens.inc(usage.cached_tokens)
        (metrics.hit if usage.cached_tokens else metrics.miss).inc()
        metrics.generated_tokens.inc(usage.completion_tokens)
        metrics.duration.observe(elapsed)
        end = elapsed
        for phase, start in reversed(record.spans):  # each ends where the next begins
            if phase is Phase.QUEUE:
                metrics.queue.observe(end - start)
            elif phase is Phase.PREFILL and record.first_output is not None:
                metrics.prefill.observe(end - start)
            end = start
