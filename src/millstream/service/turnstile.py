"""The turnstile: of all requests that start or end together, one goes on per turn of the event loop.

Between two turns the event loop looks for tokens of running streams, so they wait for the work of one request at most.
Without it they would wait for all: a loop runs whatever is ready before it looks again.

Where tokens of many streams take most of the time, requests get as much: after tokens were delivered, as many go on in
one turn as take about as long. So requests get half of a busy loop, and tokens wait no longer than it takes to write
them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextvars import Context
from weakref import WeakKeyDictionary

Call = Callable[[], None]

LEAST = 1
"""So many pass in a turn if no tokens were delivered. Each turn costs a look for events, so more would start sooner,
but tokens would wait for all of them."""

NEWEST = 0.1
"""The weight of the latest turn in what a request costs."""


class Turnstile:
    """Used on one event loop, which it does not hold. A call may wake a task: the task then runs in the next turn.

    Requests that have begun come first: so the oldest is done first, and no more are under way than need be. They
    cannot keep new ones out, since each of them was new before.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._begun: deque[Call] = deque()
        self._new: deque[Call] = deque()
        self._passed = 0
        """How many have passed in this turn."""
        self._since = 0.0
        """When this turn began."""
        self._delivering = 0.0
        """Seconds of this turn in which tokens were delivered."""
        self._cost = 0.0
        """Seconds that a request takes for each time that it passes; 0 before it is known."""
        self._context = Context()
        """Of calls that have waited: not that of whoever passed before them."""

    def enter(self, call: Call, *, begun: bool) -> None:
        """Call it: at once if nobody has passed in this turn, else in one of the next turns, in order of arrival.
        `begun`: it continues a request that has begun."""
        if self._passed:
            (self._begun if begun else self._new).append(call)
        else:
            self._since, self._delivering = self._clock(), 0.0
            (self._begun if begun else self._new).append(call)
            self._let_in(1)

    def delivered(self, seconds: float) -> None:
        """So long the loop was busy with tokens of running streams just now."""
        self._delivering += seconds

    def _let_in(self, most: int) -> None:
        try:
            while self._passed < most and (queue := self._begun or self._new):
                self._passed += 1
                queue.popleft()()
        finally:
            asyncio.get_running_loop().call_soon(self._turn, context=self._context)

    def _turn(self) -> None:
        """The next turn: what passed in the last one has run."""
        now = self._clock()
        cost = max(0.0, now - self._since - self._delivering) / self._passed
        self._cost += (cost - self._cost) * (NEWEST if self._cost else 1.0)
        most = LEAST + (int(self._delivering / self._cost) if self._cost else 0)
        self._since, self._delivering, self._passed = now, 0.0, 0
        if self._begun or self._new:
            self._let_in(most)


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
