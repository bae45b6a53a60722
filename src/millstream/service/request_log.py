"""The log line of each request: tokens, times, how it ended, and for a slow one where the time went."""

from __future__ import annotations

import logging

from millstream.service.journal import Phase, RequestRecord

log = logging.getLogger(__name__)

SLOW_PREPARE, SLOW_QUEUE, SLOW_PREFILL = 1.0, 5.0, 10.0
"""Seconds in a phase that are worth a warning."""
SLOW_TOKENS_PER_SECOND, SLOW_DECODE = 2.0, 10.0
"""A decode that takes longer than so many seconds is slow if it is below this rate: long answers are not slow."""
GENERATES = ("chat", "text_completion")
"""Operations with output tokens."""


def log_request(record: RequestRecord) -> None:
    """Listens to the journal."""
    slow = slow_phases(record)
    level = logging.WARNING if slow or (record.failure is not None and record.failure.is_fault) else logging.INFO
    if not log.isEnabledFor(level):
        return
    text = f"{record.request_id} {record.context.dialect} {record.model}: {_outcome(record)}{_times(record)}"
    if slow:
        text += f"; slow {' and '.join(slow)}: {_breakdown(record)}"
    log.log(level, "%s", text, extra={"fields": fields_of(record)})


def slow_phases(record: RequestRecord) -> list[Phase]:
    limits = ((Phase.PREPARE, SLOW_PREPARE), (Phase.QUEUE, SLOW_QUEUE), (Phase.PREFILL, SLOW_PREFILL))
    slow = [phase for phase, limit in limits if record.seconds(phase) > limit]
    decode = record.seconds(Phase.DECODE)
    if decode > SLOW_DECODE and record.completion_tokens < SLOW_TOKENS_PER_SECOND * decode:
        slow.append(Phase.DECODE)
    return slow


def fields_of(record: RequestRecord) -> dict[str, object]:
    """The same for programs: the fields of a line in JSON."""
    fields: dict[str, object] = {
        "event": "request",
        "request_id": record.request_id,
        "dialect": record.context.dialect,
        "endpoint": record.context.endpoint,
        "model": record.model,
        "outcome": record.outcome,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "media": record.media,
        "completion_tokens": record.completion_tokens,
        "drafted_tokens": record.drafted_tokens,
        "accepted_tokens": record.accepted_tokens,
        "finish_reason": record.finish_reason,
        "first_token_seconds": _rounded(record.first_output),
        "total_seconds": _rounded(record.total),
        "load_seconds": _rounded(record.load_seconds),
    }
    fields |= {f"{phase}_seconds": _rounded(record.seconds(phase)) for phase in Phase}
    if record.failure is not None:
        fields |= {"status": record.failure.status, "code": record.failure.code, "error": record.failure.reason}
    return fields


def _outcome(record: RequestRecord) -> str:
    failure = record.failure
    if failure is not None and record.phases[-1].phase in (Phase.PREPARE, Phase.QUEUE):
        return f"{'failed' if failure.is_fault else 'refused'} with {failure.status}, {failure.reason}"
    cached = f" ({record.cached_tokens} cached)" if record.cached_tokens else ""
    media = f", {record.media} media file{'s' if record.media > 1 else ''}" if record.media else ""
    out = f", {record.completion_tokens} tokens out" if record.operation in GENERATES else ""
    drafts = f" ({record.accepted_tokens} of {record.drafted_tokens} drafted)" if record.drafted_tokens else ""
    text = f"{record.prompt_tokens or 0} prompt tokens{cached}{media}{out}{drafts}, "
    if failure is not None:
        return f"{text}failed with {failure.status}, {failure.reason}"
    return text + (record.finish_reason or record.outcome or "")


def _times(record: RequestRecord) -> str:
    parts = [f"queue {milliseconds(record.seconds(Phase.QUEUE))}"] if len(record.spans) > 1 else []
    if record.first_output is not None:
        parts.append(f"first token {milliseconds(record.first_output)}")
    return "; " + ", ".join([*parts, f"total {record.total or 0:.2f} s"])


def _breakdown(record: RequestRecord) -> str:
    parts = [f"{span.phase} {record.seconds(span.phase):.2f} s" for span in record.phases]
    if record.load_seconds > SLOW_PREPARE / 2:
        parts[0] += f" ({record.load_seconds:.2f} s of it until the model was loaded)"
    return ", ".join(parts)


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
