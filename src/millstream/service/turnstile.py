"""The turnstile: of all requests that start or end together, one goes on per turn of the event loop.

Between two turns the event loop looks for tokens of running streams, so they wait for the work of one request at most.
Without it they would wait for all: a loop runs whatever is ready before it looks again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context
from weakref import WeakKeyDictionary

Call = Callable[[], None]


class Turnstile:
    """Used on one event loop, which it does not hold. A call may wake a task: the task then runs in the next turn.

    Requests that have begun come first: so the oldest is done first, and no more are under way than need be. They
    cannot keep new ones out, since each of them was new before.
    """

    def __init__(self) -> None:
        self._begun: deque[Call] = deque()
        self._new: deque[Call] = deque()
        self._passed = False
        """True if somebody has passed in this turn."""
        self._context = Context()
        """Of calls that have waited: not that of whoever passed before them."""

    def enter(self, call: Call, *, begun: bool) -> None:
        """Call it: at once if nobody has passed in this turn, else in one of the next turns, in order of arrival.
        `begun`: it continues a request that has begun."""
        if self._passed:
            (self._begun if begun else self._new).append(call)
        else:
            self._pass(call)

    def _pass(self, call: Call) -> None:
        self._passed = True
        try:
            call()
        finally:
            asyncio.get_running_loop().call_soon(self._turn, context=self._context)

    def _turn(self) -> None:
        self._passed = False
        if queue := self._begun or self._new:
            self._pass(queue.popleft())


_TURNSTILES: WeakKeyDictionary[asyncio.AbstractEventLoop, Turnstile] = WeakKeyDictionary()


def enter_new(call: Call) -> None:
    """Of the running event loop, for what may begin a request."""
    turnstile().enter(call, begun=False)


def turnstile() -> Turnstile:
    """The one of the running event loop."""
    loop = asyncio.get_running_loop()
    if (found := _TURNSTILES.get(loop)) is None:
        found = _TURNSTILES[loop] = Turnstile()
    return found
