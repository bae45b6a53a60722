"""What ties objects to threads: a guard for those of an owner, and what a thread does last."""

from __future__ import annotations

import threading
from collections.abc import Callable


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


class _LastAct:
    """Lives in the thread's own storage, which Python clears on the thread itself when that ends."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def __del__(self) -> None:
        self._act()


class _ThreadStorage(threading.local):
    def __init__(self) -> None:
        self.last_act: _LastAct | None = None


_storage = _ThreadStorage()


def at_thread_end(act: Callable[[], None]) -> None:
    """Have this thread call `act` when it ends; one act a thread. Not the main thread: that ends with its process."""
    if _storage.last_act is None and threading.current_thread() is not threading.main_thread():
        _storage.last_act = _LastAct(act)
