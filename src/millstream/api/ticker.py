"""One timer for many responses: a timer of its own costs a response more than a chunk, and nearly none runs out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from weakref import WeakKeyDictionary

Check = Callable[[], None]


class Ticker:
    """Calls checks every so many seconds, as long as there are any. Used on one event loop, which it does not hold: it
    is forgotten with its loop."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._checks: dict[Check, None] = {}
        self._runs = False

    def add(self, check: Check) -> None:
        """Its first call comes within the seconds, or at once."""
        self._checks[check] = None
        if not self._runs:
            self._schedule()

    def remove(self, check: Check) -> None:
        """Does nothing if it was removed before."""
        self._checks.pop(check, None)

    def _schedule(self) -> None:
        self._runs = True
        asyncio.get_running_loop().call_later(self._seconds, self._tick)

    def _tick(self) -> None:
        self._runs = False
        if self._checks:
            self._schedule()
        for check in list(self._checks):
            check()


_TICKERS: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[float, Ticker]] = WeakKeyDictionary()


def ticker(seconds: float) -> Ticker:
    """The one of the running event loop with this interval. Intervals come from settings, so they are few."""
    tickers = _TICKERS.setdefault(asyncio.get_running_loop(), {})
    if (found := tickers.get(seconds)) is None:
        found = tickers[seconds] = Ticker(seconds)
    return found
