"""The server's own state for operators: memory, history, requests. See `ports.ServerState`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from millstream.service.history import History
from millstream.service.hub import ModelHub
from millstream.service.journal import Journal, RequestRecord
from millstream.service.ports import HistoryView, PhaseView, RequestView, ServerStatus

_STATM = Path("/proc/self/statm")


class StateOperations:
    def __init__(self, hub: ModelHub, journal: Journal, history: History) -> None:
        self._hub = hub
        self._journal = journal
        self._history = history
        self._begun = time.monotonic()

    def status(self) -> ServerStatus:
        return ServerStatus(
            uptime=time.monotonic() - self._begun,
            memory_budget=self._hub.memory.total,
            memory_used=sum(card.memory_bytes for card in self._hub.cards()),
            pid=os.getpid(),
            rss_bytes=resident_bytes(),
        )

    def history(self, since: float) -> HistoryView:
        return self._history.view(since)

    def requests(self, limit: int) -> tuple[Sequence[RequestView], Sequence[RequestView]]:
        return list(map(_view, self._journal.running)), list(map(_view, self._journal.recent(limit)))


def resident_bytes() -> int | None:
    """The memory of this process, where the system tells it without another program: on Linux. It reads no disk."""
    if sys.platform != "linux":
        return None
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _view(record: RequestRecord) -> RequestView:
    start = record.started
    phases = [
        PhaseView(span.phase, start + span.start, None if span.end is None else start + span.end)
        for span in record.phases
    ]
    return RequestView(
        id=record.request_id,
        model=record.model,
        dialect=record.context.dialect,
        endpoint=record.context.endpoint,
        state=record.state,
        started=start,
        phases=phases,
        first_token=record.first_output,
        total=record.total,
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        completion_tokens=record.completion_tokens,
        drafted_tokens=record.drafted_tokens,
        accepted_tokens=record.accepted_tokens,
        finish_reason=record.finish_reason,
        error=None if record.failure is None else record.failure.reason,
    )
