"""Who may enter an engine. A full one says so at once, with numbers."""

from __future__ import annotations

from millstream.errors import BadRequest, EngineBusy


class Admission:
    """Counts the requests that an engine has accepted and not yet ended.

    A place is given back only when the engine says that the request has ended, so a cancelled row's place is not
    reused while it may still be in the batch.
    """

    def __init__(self, *, rows: int, queue: int, fail_fast: bool) -> None:
        self._rows = rows
        self._queue = 0 if fail_fast else queue
        self._held = 0

    @property
    def active(self) -> int:
        return min(self._held, self._rows)

    @property
    def waiting(self) -> int:
        return self._held - self.active

    def set_rows(self, rows: int) -> None:
        """The engine knows how many rows it can run only once its model is loaded."""
        self._rows = rows

    def admit(self, count: int) -> None:
        limit = self._rows + self._queue
        if count > limit:
            raise BadRequest(
                f"this request needs {count} answers at once; this server takes at most {limit} "
                f"({self._rows} rows and {self._queue} waiting). Ask for fewer.",
                param="n",
            )
        if self._held + count > limit:
            # A guess that grows with the line: about a second for each full batch ahead.
            retry_after = 1 + self.waiting // self._rows
            raise EngineBusy(
                f"the engine is full: {self.active} active, {self.waiting} waiting. Try again in {retry_after} s.",
                active=self.active,
                waiting=self.waiting,
                retry_after=retry_after,
            )
        self._held += count

    def carry_on(self) -> None:
        """For a request that follows one which is just being cancelled: for a moment both hold a place."""
        self._held += 1

    def release(self) -> None:
        self._held -= 1
