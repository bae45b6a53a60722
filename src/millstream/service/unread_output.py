"""A budget for output that clients have not read yet, over all requests."""

from __future__ import annotations

import logging
from typing import Protocol

from millstream.errors import OutputUnread

log = logging.getLogger(__name__)

SHARES = 32
"""All requests together may leave this many times the limit of one request unread."""


class Unread(Protocol):
    """The unread output of one request."""

    @property
    def unread(self) -> int: ...

    def end(self, error: OutputUnread) -> None:
        """Drop unread output and accept no more; the reader gets the error."""
        ...


class UnreadOutput:
    """Ends a request that leaves more than `each` bytes unread, and the worst one if all together leave too much."""

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
        """Called when a request has more unread output: ends one request if that is too much."""
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
