"""Admission to an engine: counts its requests, and rejects further ones at once when it is full."""

from __future__ import annotations

import time
from collections.abc import Sequence

from millstream.errors import BadRequest, EngineBusy

LISTED = 3
"""Active requests that a rejection lists; the rest are counted."""


class Admission:
    """The requests that an engine has accepted and that have not ended.

    A request counts until the engine reports its end, so that the capacity of a cancelled one is not reused while the
    engine may still compute it.
    """

    def __init__(self, *, capacity: int, queue: int, fail_fast: bool, unit: str = "answers", param: str = "n") -> None:
        """`capacity`: requests that run at the same time. `unit` and `param` name, in errors, what a client asked for
        too many of."""
        self._capacity = capacity
        self._unit = unit
        self._param = param
        self._queue = 0 if fail_fast else queue
        self._accepted: dict[int, float] = {}
        """Request id to the time it was accepted, in the order in which they run."""

    @property
    def active(self) -> int:
        return min(len(self._accepted), self._capacity)

    @property
    def waiting(self) -> int:
        return len(self._accepted) - self.active

    def set_capacity(self, capacity: int) -> None:
        """Called once the model is loaded: the engine knows its capacity only then."""
        self._capacity = capacity

    def check(self, count: int) -> None:
        """Raises what `admit` would raise for `count` requests."""
        limit = self._capacity + self._queue
        if count > limit:
            raise BadRequest(
                f"this request needs {count} {self._unit} at once; this server accepts at most {limit} "
                f"({self._capacity} running and {self._queue} waiting). Ask for fewer.",
                param=self._param,
            )
        if len(self._accepted) + count > limit:
            # An estimate that grows with the queue: about a second for each full batch ahead.
            retry_after = 1 + self.waiting // self._capacity
            raise EngineBusy(
                f"the engine is full: {self.active} active ({self._describe_active()}), {self.waiting} waiting. "
                f"Try again in {retry_after} s.",
                active=self.active,
                waiting=self.waiting,
                retry_after=retry_after,
            )

    def admit(self, request_ids: Sequence[int]) -> None:
        self.check(len(request_ids))
        now = time.monotonic()
        self._accepted |= dict.fromkeys(request_ids, now)

    def release(self, request_id: int) -> None:
        del self._accepted[request_id]

    def _describe_active(self) -> str:
        now = time.monotonic()
        running = list(self._accepted.items())[: self.active]
        listed = [f"request {number} for {now - since:.1f} s" for number, since in running[:LISTED]]
        more = len(running) - len(listed)
        return ", ".join([*listed, f"{more} more"] if more else listed)
