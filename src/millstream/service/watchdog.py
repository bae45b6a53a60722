"""The watchdog: decides from heartbeats whether an engine hangs, and from the system whether its process is stopped.

A long step and a machine under load look alike: only the step's own limit ends them. A process that a signal has
stopped is known as such by the system, so it need not wait for that limit.
"""

from __future__ import annotations

from typing import NamedTuple

from millstream.engine.heartbeat import BEAT_EVERY, Beat

SILENCE_SECONDS = 10.0
"""Between steps an owner beats once per second. After this long without a beat it hangs."""
MIN_SILENCE = 4 * BEAT_EVERY


class Sign(NamedTuple):
    """What is seen of an engine."""

    beat: Beat
    stopped: bool
    """True if a signal has stopped its process."""


Age = tuple[Sign, float]
"""The last sign of an engine, and for how many seconds it has been the last."""


class Watchdog:
    """Counts the time between its own checks, and at most two intervals for each: if this process or the whole machine
    was suspended, engines get time for their next beat."""

    def __init__(self, step_timeout: float) -> None:
        """`step_timeout`: seconds that a step may take; 0: no limit."""
        self._step_timeout = step_timeout
        limits = [SILENCE_SECONDS, *([max(step_timeout, MIN_SILENCE)] if step_timeout else [])]
        self._silence = min(limits)
        self.interval = min([1.0, *([step_timeout / 4] if step_timeout else [])])
        """Seconds between two checks."""
        self._ages: dict[str, Age] = {}

    def check(self, name: str, beat: Beat, elapsed: float, *, stopped: bool = False) -> str | None:
        """Returns why the engine counts as hung, or None. `elapsed`: seconds since the last check of all engines."""
        sign = Sign(beat, stopped)
        before, seconds = self._ages.get(name, (Sign(Beat(), False), 0.0))
        seconds = seconds + min(elapsed, 2 * self.interval) if sign == before else 0.0
        self._ages[name] = (sign, seconds)
        if stopped:
            if seconds > self._silence:
                return f"a signal stopped the engine's process {seconds:.1f} s ago, and it did not go on"
        elif beat.step:
            if self._step_timeout and seconds > self._step_timeout:
                return (
                    f"the engine hangs: a step did not return within {seconds:.1f} s "
                    f"(--step-timeout {self._step_timeout:g})"
                )
        elif beat.last and seconds > self._silence:
            return f"the engine hangs or was stopped: no heartbeat for {seconds:.1f} s between two steps"
        return None
