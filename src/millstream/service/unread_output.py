"""A budget for output that waits for clients to read it, over all requests."""

from __future__ import annotations

import logging
from typing import Protocol

from millstream.engine.messages import Failed, Finished, PromptLogprobs, Tokens
from millstream.errors import OutputUnread

log = logging.getLogger(__name__)

RequestEvent = PromptLogprobs | Tokens | Finished | Failed

SHARES = 32
"""All requests together may leave so many times unread what one may."""
EVENT_BYTES, LOGPROB_BYTES, OPTION_BYTES = 160, 160, 120
"""What Python takes for an event, for the log-probability of a token, and for each of the likeliest tokens there."""


def event_bytes(event: RequestEvent) -> int:
    """About what an event takes while it waits."""
    if isinstance(event, (Tokens, PromptLogprobs)) and event.logprobs:
        # A prompt may have no options at its first token; all others have the same number.
        each = LOGPROB_BYTES + OPTION_BYTES * len(event.logprobs[-1].top)
        return EVENT_BYTES + len(event.logprobs) * each
    return EVENT_BYTES


class Unread(Protocol):
    """Output of one request that waits."""

    @property
    def unread(self) -> int: ...

    def end(self, error: OutputUnread) -> None:
        """Drop what waits and take no more; whoever reads gets the error."""
        ...


class UnreadOutput:
    """`each`: bytes of one request. What is over it ends; what is over the total ends the one that has left most."""

    def __init__(self, each: int) -> None:
        self.each = each
        self.limit = each * SHARES
        self.total = 0
        self._waiting: set[Unread] = set()

    def open(self, request: Unread) -> None:
        self._waiting.add(request)

    def close(self, request: Unread) -> None:
        self._waiting.discard(request)

    def relieve(self, request: Unread) -> None:
        """Called when more of a request waits: if that is too much, one ends."""
        if request.unread > self.each:
            self._end(request, f"over {_mib(self.each)} of the answer waited to be read")
        elif self.total > self.limit:
            worst = max(self._waiting, key=lambda waiting: waiting.unread)
            self._end(worst, f"over {_mib(self.limit)} of all answers waited to be read, and of this one most")

    def _end(self, request: Unread, what: str) -> None:
        log.info("a request ends: %s (--unread-output)", what)
        request.end(
            OutputUnread(f"{what}, so it was ended. Read faster, or ask for less: fewer tokens, choices or logprobs")
        )


def _mib(size: int) -> str:
    return f"{size / 2**20:.3g} MiB"
