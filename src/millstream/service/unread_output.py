"""Limits the output that clients have not read yet, per request and over all requests."""

from __future__ import annotations

import logging
from typing import Protocol

from millstream.errors import OutputUnread

log = logging.getLogger(__name__)

TOTAL_FACTOR = 32
"""All requests together may leave this many times the limit of one request unread."""


class Unread(Protocol):
    """The unread output of one request."""

    @property
    def unread(self) -> int: ...

    def end(self, error: OutputUnread) -> None:
        """Drop unread output and accept no more; the reader gets `error`."""
        ...


class UnreadOutput:
    """Ends a request with more than `per_request` unread bytes, and the one with the most if the total is too large."""

    def __init__(self, per_request: int) -> None:
        self.per_request = per_request
        self.limit = per_request * TOTAL_FACTOR
        self.total = 0
        self._requests: set[Unread] = set()

    @property
    def count(self) -> int:
        """Requests that are open."""
        return len(self._requests)

    def open(self, request: Unread) -> None:
        self._requests.add(request)

    def close(self, request: Unread) -> None:
        self._requests.discard(request)

    def check(self, request: Unread) -> None:
        """Called when a request has more unread output; ends a request if that is too much."""
        if request.unread > self.per_request:
            self._end(request, f"the client left over {_mib(self.per_request)} of this answer unread")
        elif self.total > self.limit:
            largest = max(self._requests, key=lambda each: each.unread)
            self._end(largest, f"clients left over {_mib(self.limit)} of their answers unread, most of all of this one")

    def _end(self, request: Unread, reason: str) -> None:
        log.info("ending a request: %s (--unread-output)", reason)
        request.end(
            OutputUnread(
                f"{reason}, so the request was ended. Read faster, or ask for fewer tokens, choices or logprobs."
            )
        )


def _mib(size: int) -> str:
    return f"{size / 2**20:.3g} MiB"
