"""A guard that ties an object to the thread that made it."""

from __future__ import annotations

import threading


class NotOwner(RuntimeError):
    """A method for the owner alone was called on another thread: a defect in Millstream, never a user's mistake."""


class OwnerGuard:
    """Remembers the thread it was made on and names both threads when another one calls."""

    def __init__(self) -> None:
        self.thread_id = threading.get_ident()
        self._name = threading.current_thread().name

    def check(self, what: str) -> None:
        if threading.get_ident() != self.thread_id:
            raise NotOwner(
                f"{what} belongs to thread {self._name!r} and was called on {threading.current_thread().name!r}"
            )
