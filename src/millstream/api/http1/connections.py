"""All connections of a server: enforces their number and their timeouts, and chooses which to close first."""

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
"""Seconds between two warnings in the log."""
MAX_TICKS = 2
"""Most ticks that a late tick counts for. The rest was our own delay, which no client should pay for."""


class Phase(Enum):
    IDLE = "idle"
    """No request: nothing was received yet, the headers are incomplete, or the last response is complete."""
    RECEIVING = "receiving"
    """The headers are complete, the body is not."""
    SERVING = "serving"
    """The request is complete, its response is not."""
    LEAVING = "leaving"
    """Refused: the client has a moment to read the error."""

    __hash__ = object.__hash__
    """That of enums is a Python function, and phases are keys."""


class Connection(Protocol):
    def check_timeouts(self) -> None:
        """Check the clock, and refuse or close what has taken too long."""
        ...

    def drop(self) -> None:
        """Close the connection now."""
        ...


class Connections:
    """Tracks the phase of every connection. In each phase, the connection that entered it first comes first."""

    def __init__(self, limits: HttpLimits, *, open_files: Callable[[], int | None] = lambda: None) -> None:
        self.clock = 0.0
        """Seconds during which the event loop was able to read. Stops while there is no connection."""
        self._limits = limits
        self._open_files = open_files
        self._phases: dict[Phase, dict[Connection, None]] = {phase: {} for phase in Phase}
        self._phase_of: dict[Connection, Phase] = {}
        self._ticking: asyncio.TimerHandle | None = None
        self._ticked = 0.0
        self._counts = {"refused": 0, "closed": 0}
        self._logged = -LOG_EVERY

    @property
    def cap(self) -> int:
        return self._limits.connections_within(self._open_files())

    def count(self, phase: Phase) -> int:
        return len(self._phases[phase])

    def join(self, connection: Connection) -> bool:
        """Admit a new connection, if necessary in place of one that has no request. False if the cap is reached."""
        self._enter(connection, Phase.IDLE)
        if self._ticking is None:
            self._schedule()
        cap = self.cap
        if len(self._phase_of) - self.count(Phase.LEAVING) <= cap:
            return True
        for phase in (Phase.IDLE, Phase.RECEIVING):
            if next(iter(self._phases[phase]), connection) is not connection:
                self._drop_first(phase)
                self._log("closed", cap)
                return True
        self._log("refused", cap)
        return False

    def move(self, connection: Connection, phase: Phase) -> None:
        """Does nothing for a connection that has been closed."""
        if connection in self._phase_of:
            del self._phases[self._phase_of[connection]][connection]
            self._enter(connection, phase)
        if phase is Phase.LEAVING and self.count(phase) > self._limits.lingering_within(self.cap):
            self._drop_first(phase)

    def replace(self, old: Connection, new: Connection) -> None:
        """The same socket speaks another protocol from now on, and counts as being served."""
        self.leave(old)
        self._enter(new, Phase.SERVING)

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
        self.clock += min(passed, MAX_TICKS * self._limits.tick)
        for connection in list(self._phase_of):
            connection.check_timeouts()
        self._ticking = None
        if self._phase_of:
            self._schedule()

    def _log(self, event: str, cap: int) -> None:
        """Log at most one warning per `LOG_EVERY` seconds, with the counts since the last one."""
        self._counts[event] += 1
        now = time.monotonic()
        if now - self._logged < LOG_EVERY:
            return
        self._logged = now
        log.warning(
            "all %d connections are in use (--max-connections %d, open files %s): %d refused, %d idle ones closed",
            cap, self._limits.connections, self._open_files() or "unlimited", self._counts["refused"],
            self._counts["closed"],
        )  # fmt: skip
        self._counts = dict.fromkeys(self._counts, 0)
