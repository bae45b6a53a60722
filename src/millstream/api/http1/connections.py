"""All connections of a server: how many there may be, which of them must go first, and who has taken too long."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from enum import Enum
from typing import Protocol

from millstream.api.http1.limits import HttpLimits

log = logging.getLogger(__name__)

LOG_EVERY = 10.0
SLOWEST = 2
"""Ticks that a late one counts for. The rest was our own delay, and no client pays for it."""


class Phase(Enum):
    IDLE = "idle"
    """No request: nothing has come yet, the headers are not complete, or the last answer is."""
    RECEIVING = "receiving"
    """The headers are here, the body is not."""
    SERVING = "serving"
    """A request is here and its answer is not complete."""
    LEAVING = "leaving"
    """Refused: the client has a moment to read why."""


class Connection(Protocol):
    def overdue(self) -> None:
        """Look at the clock, and end what has taken too long."""
        ...

    def drop(self) -> None:
        """Close now."""
        ...


class Connections:
    """Keeps every connection in the phase it is in, the longest there first."""

    def __init__(self, limits: HttpLimits, *, open_files: Callable[[], int | None] = lambda: None) -> None:
        self.clock = 0.0
        """Seconds in which the event loop was able to read. Stands still while there is no connection."""
        self._limits = limits
        self._open_files = open_files
        self._phases: dict[Phase, dict[Connection, None]] = {phase: {} for phase in Phase}
        self._phase_of: dict[Connection, Phase] = {}
        self._ticking: asyncio.TimerHandle | None = None
        self._ticked = 0.0
        self._news = {"refused": 0, "closed": 0}
        self._told = -LOG_EVERY

    @property
    def cap(self) -> int:
        return self._limits.connections_within(self._open_files())

    def count(self, phase: Phase) -> int:
        return len(self._phases[phase])

    def join(self, connection: Connection) -> bool:
        """Let a new connection in, if need be in place of one that has no request. False: there is no room."""
        self._enter(connection, Phase.IDLE)
        if self._ticking is None:
            self._schedule()
        cap = self.cap
        if len(self._phase_of) - self.count(Phase.LEAVING) <= cap:
            return True
        for phase in (Phase.IDLE, Phase.RECEIVING):
            if next(iter(self._phases[phase]), connection) is not connection:
                self._drop_first(phase)
                self._tell("closed", cap)
                return True
        self._tell("refused", cap)
        return False

    def move(self, connection: Connection, phase: Phase) -> None:
        """Does nothing for a connection that has left."""
        if connection in self._phase_of:
            del self._phases[self._phase_of[connection]][connection]
            self._enter(connection, phase)
        if phase is Phase.LEAVING and self.count(phase) > self._limits.lingering_within(self.cap):
            self._drop_first(phase)

    def leave(self, connection: Connection) -> None:
        phase = self._phase_of.pop(connection, None)
        if phase is not None:
            del self._phases[phase][connection]

    def _drop_first(self, phase: Phase) -> None:
        oldest = next(iter(self._phases[phase]))
        self.leave(oldest)
        oldest.drop()

    def _enter(self, connection: Connection, phase: Phase) -> None:
        self._phase_of[connection] = phase
        self._phases[phase][connection] = None

    def _schedule(self) -> None:
        loop = asyncio.get_running_loop()
        self._ticked = time.monotonic()
        self._ticking = loop.call_later(self._limits.tick, self._tick)

    def _tick(self) -> None:
        passed = time.monotonic() - self._ticked
        self.clock += min(passed, SLOWEST * self._limits.tick)
        for connection in list(self._phase_of):
            connection.overdue()
        self._ticking = None
        if self._phase_of:
            self._schedule()

    def _tell(self, what: str, cap: int) -> None:
        """Once in a while, with how often it has happened since."""
        self._news[what] += 1
        now = time.monotonic()
        if now - self._told < LOG_EVERY:
            return
        self._told = now
        log.warning(
            "all %d connections are in use (--max-connections %d, open files %s): %d refused, %d idle ones closed",
            cap, self._limits.connections, self._open_files() or "unlimited", self._news["refused"],
            self._news["closed"],
        )  # fmt: skip
        self._news = dict.fromkeys(self._news, 0)
