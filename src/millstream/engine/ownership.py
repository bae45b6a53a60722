"""Ties objects to threads: a guard that checks the calling thread, and a callback at the end of a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable


class NotOwner(RuntimeError):
    """An owner-only method was called on another thread: a defect in Millstream, never a user's mistake."""


class OwnerGuard:
    """Checks that methods are called on the thread that created it."""

    def __init__(self) -> None:
        self.thread_id = threading.get_ident()
        self._name = threading.current_thread().name

    def check(self, what: str) -> None:
        """Raises `NotOwner`, which names both threads, on any other thread."""
        if threading.get_ident() != self.thread_id:
            raise NotOwner(
                f"{what} belongs to thread {self._name!r} and was called on {threading.current_thread().name!r}"
            )


class _EndCallback:
    """Lives in thread-local storage, which Python clears on the thread itself when it ends."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback

    def __del__(self) -> None:
        self._callback()


class _ThreadStorage(threading.local):
    def __init__(self) -> None:
        self.end_callback: _EndCallback | None = None


_storage = _ThreadStorage()


def at_thread_end(callback: Callable[[], None]) -> None:
    """Call `callback` on this thread when it ends; only the first callback of a thread counts. Does nothing on the main
    thread, which ends with its process."""
    if _storage.end_callback is None and threading.current_thread() is not threading.main_thread():
        _storage.end_callback = _EndCallback(callback)
