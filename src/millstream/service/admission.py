"""Who may enter an engine. A full one says so at once, with numbers."""

from __future__ import annotations

import time
from collections.abc import Sequence

from millstream.errors import BadRequest, EngineBusy

NAMED = 3
"""Active requests that a refusal names; of more it tells the number."""


class Admission:
    """Knows the requests that an engine has accepted and not yet ended.

    A place is given back only when the engine says that the request has ended, so a cancelled row's place is not
    reused while it may still be in the batch.
    """

    def __init__(self, *, rows: int, queue: int, fail_fast: bool) -> None:
        self._rows = rows
        self._queue = 0 if fail_fast else queue
        self._held: dict[int, float] = {}
        """Since when each is here, in the order in which they get rows."""

    @property
    def active(self) -> int:
        return min(len(self._held), self._rows)

    @property
    def waiting(self) -> int:
        return len(self._held) - self.active

    def set_rows(self, rows: int) -> None:
        """The engine knows how many rows it can run only once its model is loaded."""
        self._rows = rows

    def check(self, count: int) -> None:
        """Raise what `admit` would raise for so many requests, and take nothing."""
        limit = self._rows + self._queue
        if count > limit:
            raise BadRequest(
                f"this request needs {count} answers at once; this server takes at most {limit} "
                f"({self._rows} rows and {self._queue} waiting). Ask for fewer.",
                param="n",
            )
        if len(self._held) + count > limit:
            # A guess that grows with the line: about a second for each full batch ahead.
            retry_after = 1 + self.waiting // self._rows
            raise EngineBusy(
                f"the engine is full: {self.active} active ({self._names()}), {self.waiting} waiting. "
                f"Try again in {retry_after} s.",
                active=self.active,
                waiting=self.waiting,
                retry_after=retry_after,
            )

    def admit(self, request_ids: Sequence[int]) -> None:
        self.check(len(request_ids))
        now = time.monotonic()
        self._held |= dict.fromkeys(request_ids, now)

    def carry_on(self, request_id: int) -> None:
        """For a request that follows one which is just being cancelled: for a moment both hold a place."""
        self._held[request_id] = time.monotonic()

    def release(self, request_id: int) -> None:
        del self._held[request_id]

    def _names(self) -> str:
        now = time.monotonic()
        running = list(self._held.items())[: self.active]
        named = [f"request {number} for {now - since:.1f} s" for number, since in running[:NAMED]]
        more = len(running) - len(named)
        return ", ".join([*named, f"{more} more"] if more else named)
